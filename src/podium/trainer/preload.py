"""The modules that are imported ahead: by worker processes what models need, and by the controller, in a thread while
it waits for its workers, what a run needs later.

The controller needs transformers' tokenizers and configurations only. The modules of Podium's roles, which it imports
too, therefore import no model classes, no FSDP and no distributed checkpoints by themselves. Worker processes need
these as soon as they make a model.
"""

import importlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from podium.rollout.environments import find_rollout_worker

MODEL_MODULES: Final = (
    *("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "transformers.modeling_layers"),
    *(
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint.hf_storage",
        "torch.distributed.checkpoint.state_dict_loader",
    ),
)
"""Modules of other libraries that only processes with models need. They take longer to import than all the rest."""

PRELOAD: Final = (
    "torch",
    "transformers",
    *MODEL_MODULES,
    *(f"podium.workers.{role}" for role in ("policy", "reference", "critic", "reward_model", "estimator", "generator")),
    *([entry.module] if (entry := find_rollout_worker()) is not None else []),
)
"""Modules that worker processes import before their workers are made. The fork server of ``local`` imports them once
for all processes."""

LATER: Final = ("pyarrow.parquet", "pandas", "matplotlib.figure", "matplotlib.backends.backend_agg", "plotext")
"""Modules that write completions (pyarrow imports pandas with its first array) and draw curves."""


@contextmanager
def importing(modules: Sequence[str]) -> Iterator[None]:
    """Import ``modules`` one after another in a thread. The end of the block waits for the current import and skips the
    rest. A module that cannot be imported is skipped too; the code that needs it raises the error."""
    ended = threading.Event()

    def run() -> None:
        for name in modules:
            if ended.is_set():
                return
            with suppress(Exception):
                importlib.import_module(name)

    thread = threading.Thread(target=run, name="podium-imports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
