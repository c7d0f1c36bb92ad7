"""Names of the modules that worker processes need, so that these processes can import them before the controller does.

The controller needs transformers' tokenizers and configurations only. The modules of Podium's roles, which it imports
too, therefore import no model classes, no FSDP and no distributed checkpoints by themselves. Worker processes need
these as soon as they make a model.
"""

from typing import Final

from podium.rollout.environments import find_rollout

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
    *([entry.module] if (entry := find_rollout()) is not None else []),
)
"""Modules that worker processes import before their workers are made. The fork server of ``local`` imports them once
for all processes."""
