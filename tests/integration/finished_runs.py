"""Finished runs for tests to read, one of each layout: made once, by the first process of the tests that asks.

The fixtures of conftest.py give a test the folder of a layout, in which nothing may change. A test that resumes a run,
or changes what it left, takes a copy of it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from podium.models import ModelConfig, load_model, load_tokenizer
from podium.models.loading import save_pretrained
from podium.telemetry import StepFinished, subscribe
from podium.trainer import GRPOConfig, PPOTrainer, SFTConfig
from tests.integration.rewards import longer_is_better
from tests.integration.training import MODEL, tiny, train

__all__ = [
    "LAYOUTS", "TEMPLATE", "compute_logits", "copy_folder", "grpo_config", "read_logits", "read_only", "sft_config",
    "share_folder", "write_base",
]  # fmt: skip

MODELS = ("model", "policy", "resume", "base")  # directories that export copies with their permissions
TOKENS = [[4, 5, 6, 14, 7, 8]]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def compute_logits(model: Any) -> Tensor:
    """The logits ``[1, T, V]`` of a model for a few tokens."""
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits


def read_logits(folder: Path) -> dict[int, Tensor]:
    """The logits of the policy in the run of ``folder`` after each step, by the step."""
    return {int(path.stem[7:]): torch.load(path) for path in folder.glob("logits-*.pt")}


def write_base(folder: Path, seed: int = 0) -> dict[str, Any]:
    """Save a model in ``folder``, and return the settings of adapters upon it."""
    model = load_model(ModelConfig(**MODEL, seed=seed))
    save_pretrained(model, model.state_dict(), folder, load_tokenizer(MODEL["tokenizer"]))
    return {"path": str(folder), "config": {}, "tokenizer": "", "lora": {"rank": 2}}


def grpo_config(folder: Path, **sections: Any) -> GRPOConfig:
    """Three steps, each with a checkpoint, and evaluations before the first step and after the second and third."""
    (folder / "template.jinja").write_text(TEMPLATE)
    own: dict[str, Any] = {
        "run": {"steps": 3},
        "data": {"chat_template": str(folder / "template.jinja")},
        "save": {"every": 1, "keep": 0},
        "eval": {"items": 4, "every": 2},
    }
    for name, section in sections.items():
        own[name] = {**own.get(name, {}), **section}
    return tiny(GRPOConfig, folder, **own)


def sft_config(folder: Path, **sections: Any) -> SFTConfig:
    """Three steps of supervised fine-tuning."""
    return tiny(SFTConfig, folder, **{**sections, "run": {"steps": 3, **sections.get("run", {})}})


def _grpo(folder: Path) -> None:
    _train_and_keep_logits(folder, grpo_config(folder))


def _lora(folder: Path) -> None:
    """Adapters upon the model in ``base``. Nothing is evaluated."""
    algorithm = {"kl_in": "loss", "kl_coef": 0.01}
    config = grpo_config(folder, model=write_base(folder / "base"), algorithm=algorithm, eval={"items": 0})
    _train_and_keep_logits(folder, config, reward=longer_is_better)


def _sft(folder: Path) -> None:
    train(sft_config(folder))


def _sessions(folder: Path) -> None:
    """Sessions of two turns, each of which has a reward of its own."""
    from tests.integration.test_environments import sessions_config  # which reads these runs

    train(sessions_config(folder))


LAYOUTS: dict[str, Callable[[Path], None]] = {"grpo": _grpo, "lora": _lora, "sft": _sft, "sessions": _sessions}


def _train_and_keep_logits(folder: Path, config: GRPOConfig, **options: Any) -> None:
    trainer = PPOTrainer(config, cluster="inline", show=False, **options)

    def keep(event: object) -> None:
        if isinstance(event, StepFinished):
            (logits,) = trainer.run.roles.policy.group.run(lambda worker: compute_logits(worker.model))
            torch.save(logits, folder / f"logits-{event.step}.pt")

    unsubscribe = subscribe(keep)
    try:
        trainer.fit()
    finally:
        unsubscribe()


def share_folder(factory: pytest.TempPathFactory, layout: str) -> Path:
    """Return the folder of ``layout``. The first process that asks makes it, and the others wait for that one."""
    root = factory.getbasetemp()
    root = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "finished"
    root.mkdir(exist_ok=True)
    folder, ready = root / layout, root / f"{layout}.ready"
    with (root / f"{layout}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that failed to make it
            folder.mkdir()
            LAYOUTS[layout](folder)
            for path in (folder, *folder.rglob("*")):
                if path.is_dir() and path.name not in MODELS:
                    path.chmod(0o555)
            ready.touch()
    return folder


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """Give ``folder`` to a test. It fails if something in the folder has changed, which root could change."""
    before = _list_files(folder)
    yield folder
    assert _list_files(folder) == before, f"{folder} is read by other tests too: change a copy of it"


def copy_folder(folder: Path, to: Path) -> Path:
    """Copy ``folder`` to ``to``, where all may be changed."""
    shutil.copytree(folder, to, symlinks=True)
    for path in (to, *to.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    return to


def _list_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of the last change of each file and folder."""
    entries = ((path, path.lstat()) for path in folder.rglob("*"))
    return {str(path): (entry.st_size, entry.st_mtime_ns) for path, entry in entries}
