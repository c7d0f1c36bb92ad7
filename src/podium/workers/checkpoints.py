"""Resumable checkpoints of a :class:`~podium.workers.TrainEngine`, by torch.distributed.checkpoint.

Parameters, optimizer state, step counts and each rank's random state. Written on some number of ranks, replicated or
sharded, a checkpoint is read on another. The learning rate follows from the step. Making a directory appear at once, by
renaming, is its owner's task.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from podium.devices import random_state, set_random_state
from podium.errors import CheckpointError
from podium.workers.engine import TrainEngine

__all__ = ["load_checkpoint", "save_checkpoint"]

_RANDOM = "random."


def save_checkpoint(engine: TrainEngine, path: str | Path, *, rank: int) -> None:
    """Write the engine's whole state into the directory ``path``; all ranks call it together.

    Raises:
        CheckpointError: the directory cannot be written, or is not the same one for all ranks.
    """
    try:
        with _single_process_is_fine() as alone:
            save(_state(engine, rank), checkpoint_id=str(path), no_dist=alone)
        elsewhere = _missing_files(Path(path)) if rank == 0 else []
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"cannot write the checkpoint {path}: {error}") from error
    if elsewhere:
        raise CheckpointError(
            f"the checkpoint {path} lacks {', '.join(elsewhere)}, which other ranks wrote on their own machines: a "
            "run's directory must be on a file system that all nodes share"
        )


def load_checkpoint(engine: TrainEngine, path: str | Path, *, rank: int) -> None:
    """Read what :func:`save_checkpoint` wrote into the engine, in place; all ranks call it together.

    A rank that did not exist when the checkpoint was written keeps its random state.

    Raises:
        CheckpointError: no checkpoint there, or one of another model.
    """
    try:
        stored = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"no finished checkpoint at {path}: {error}") from error
    state = _state(engine, rank)
    absent = sorted(name for name in state if name not in stored and not name.startswith(_RANDOM))
    extra = sorted(name for name in stored if name not in state and not name.startswith(_RANDOM))
    if absent or extra:
        raise CheckpointError(f"the checkpoint {path} is of another model: it lacks {absent[:3]} and has {extra[:3]}")
    wanted = {name: value for name, value in state.items() if name in stored}
    try:
        with _single_process_is_fine() as alone:
            load(wanted, checkpoint_id=str(path), no_dist=alone)
    except (OSError, ValueError, CheckpointException) as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error}") from error
    engine.step_count, engine.skipped_count = (int(count) for count in wanted["counts"])
    _restore_random(engine, wanted, rank)


def _missing_files(path: Path) -> list[str]:
    """Files that the metadata of a checkpoint names and that are not there."""
    stored: Any = FileSystemReader(str(path)).read_metadata().storage_data
    return sorted({one.relative_path for one in stored.values()} - {file.name for file in path.iterdir()})


@contextmanager
def _single_process_is_fine() -> Iterator[bool]:
    """Whether there is no process group; torch would warn of what is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield not dist.is_initialized()


def _state(engine: TrainEngine, rank: int) -> dict[str, Tensor]:
    """Flat names to the engine's own tensors, so that reading into them is loading."""
    state = {f"model.{name}": parameter.detach() for name, parameter in engine.model.named_parameters()}
    if engine.optimizer is not None:
        for name, parameter in engine.model.named_parameters():
            for key, value in engine.optimizer.state.get(parameter, {}).items():
                state[f"optimizer.{name}.{key}"] = value
    state["counts"] = torch.tensor([engine.step_count, engine.skipped_count])
    for kind, device in _generators(engine).items():
        state[f"{_RANDOM}{rank}.{kind}"] = random_state(device)
    return state


def _restore_random(engine: TrainEngine, state: dict[str, Tensor], rank: int) -> None:
    for kind, device in _generators(engine).items():
        if (value := state.get(f"{_RANDOM}{rank}.{kind}")) is not None:
            set_random_state(device, value)


def _generators(engine: TrainEngine) -> dict[str, torch.device]:
    devices = {"cpu": torch.device("cpu")}
    return devices if engine.device.type == "cpu" else {**devices, "device": engine.device}
