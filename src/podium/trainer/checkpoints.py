"""Checkpoints of a run hold all that the next step depends on. A checkpoint is complete, or it is not there.

A checkpoint is data: reading one runs no code, whoever wrote it. A file that is not as it was written is refused.

checkpoints/step-000012/
  trainer.json      step, place in the data, coefficients, evaluations so far, time spent
  policy/ critic/   model, optimizer, step count and random state, written by their workers as safetensors
  manifest.json     the size and checksum of each file, here and in each of these directories
checkpoints/latest  a link to the newest

write aside ─▶ sync every file ─▶ rename ─▶ move `latest` ─▶ remove what is beyond `keep`
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from podium.errors import CheckpointError
from podium.telemetry import CheckpointSaved, Sample, emit
from podium.trainer.evaluate import Evaluation
from podium.trainer.files import remove, step_name, step_of, sync_folder, sync_tree
from podium.workers.manifest import check_manifest, file_sums, write_manifest

if TYPE_CHECKING:
    from podium.trainer.roles import Roles

__all__ = ["Checkpoints", "TrainerState", "load_checkpoint"]

_STATE: Final = "trainer.json"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The state of the controller. Seeds need no state: what is drawn at a step depends on the seed and the step alone.

    Attributes:
        step: The last step that is finished.
        prompts: Place in the stream of prompts or examples, after those of ``step``.
        kl_coef: Coefficient of the KL, from its controller.
        first, last: Evaluations, which may be the same one.
        wall_s: Seconds of training so far.
        stage_s, stage_tokens: Totals by stage, for the speeds in the summary.
        ledger: Length of the ledger's file in bytes; 0 for checkpoints from before there was one.
        given: Names of the functions and classes that a script gave the run beside its configuration.
    """

    step: int = 0
    prompts: Mapping[str, Any] = field(default_factory=dict)
    kl_coef: float = 0.0
    first: Evaluation | None = None
    last: Evaluation | None = None
    wall_s: float = 0.0
    stage_s: Mapping[str, float] = field(default_factory=dict)
    stage_tokens: Mapping[str, float] = field(default_factory=dict)
    ledger: int = 0
    given: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> TrainerState:
        """Read the state in the file at ``path``. Raises CheckpointError for anything else."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            for name in ("first", "last"):
                if (found := values[name]) is not None:
                    values[name] = Evaluation(**{**found, "samples": tuple(Sample(**one) for one in found["samples"])})
            return TrainerState(**values)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is not the state of a training run: {error}") from error


def load_checkpoint(path: Path, roles: Roles) -> TrainerState:
    """Restore the roles from the checkpoint at ``path``, and return the controller's own state.

    Raises:
        CheckpointError: The checkpoint is damaged, does not fit the roles, or belongs to another kind of run.
    """
    check_manifest(path, others=[entry.name for entry in path.iterdir() if entry.is_dir()])
    state = TrainerState.read(path / _STATE)
    for name, worker in roles.learners.items():
        if not (path / name).is_dir():
            raise CheckpointError(f"{path} holds no {name}, and this configuration has one")
        worker.load(str(path.absolute() / name))
    return state


class Checkpoints:
    """The checkpoints in ``folder``, which is created if it is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._tidy()

    def save(self, state: TrainerState, roles: Roles, *, keep: int, keep_best: int = 0) -> None:
        """Write a checkpoint of ``state.step``, then remove all but the ``keep`` newest and the ``keep_best`` best.
        ``keep`` of 0 removes none.

        Raises:
            CheckpointError: A worker on another machine wrote to a disk that this process does not see.
            OSError: The disk refuses.
        """
        with self.writing(state.step, keep=keep, keep_best=keep_best) as folder:
            whole = folder.absolute()  # a worker has a working directory of its own
            for name, worker in roles.learners.items():
                worker.save(str(whole / name))
                if not (folder / name).is_dir():
                    raise CheckpointError(
                        f"{whole / name} was written on another machine and is not here: a run's directory must be on "
                        "a file system that all nodes share; set run.dir to one"
                    )
            (folder / _STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
            write_manifest(folder, file_sums([folder / _STATE]))

    @contextmanager
    def writing(self, step: int, *, keep: int = 0, keep_best: int = 0) -> Iterator[Path]:
        """Give a folder to write the checkpoint of ``step`` into, which is complete and ``latest`` after the block.

        If the block raises, nothing remains of the folder.
        """
        aside = self.folder / f".{step_name(step)}.tmp"
        remove(aside)
        aside.mkdir()
        try:
            yield aside
        except BaseException:
            remove(aside)
            raise
        final = self.folder / step_name(step)
        _commit(aside, final)
        emit(CheckpointSaved(step, str(final)))
        kept = {final, *self._ranked()[:keep_best]}
        for old in self.all()[:-keep] if keep > 0 else []:
            if old not in kept:
                remove(old)

    def all(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        found = {entry: step_of(entry.name) for entry in self.folder.iterdir()}
        return sorted((entry for entry in found if found[entry] is not None), key=lambda entry: found[entry] or 0)

    def latest(self) -> Path | None:
        """Return the checkpoint that ``latest`` names, or the newest one if that was deleted; None if there is none."""
        link, there = self.folder / "latest", self.all()
        newest = there[-1] if there else None
        if link.is_symlink():
            named = self.folder / Path(os.readlink(link)).name
            if named in there:
                return named
            _logger.warning("%s points at %s, which is gone; using %s", link, named, newest)
        return newest

    def best(self) -> Path | None:
        """Return the checkpoint with the highest held-out accuracy, the newest of equals; None if none was measured."""
        return next(iter(self._ranked()), None)

    def _ranked(self) -> list[Path]:
        """The checkpoints whose step was evaluated, the best first."""
        found: list[tuple[float, int, Path]] = []
        for path in self.all():
            with suppress(CheckpointError):
                state = TrainerState.read(path / _STATE)
                if state.last is not None and state.last.step == state.step:
                    found.append((state.last.accuracy, state.step, path))
        return [path for *_, path in sorted(found, reverse=True)]

    def _tidy(self) -> None:
        """Remove what a process that was killed in the middle of a checkpoint left."""
        for half in self.folder.glob(".*.tmp"):
            remove(half)
        for replaced in self.folder.glob(".step-*.old"):
            final = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".old"))
            if final.exists():
                remove(replaced)
            else:
                replaced.rename(final)  # killed between the two renames: the old one is the newest complete one


def _commit(aside: Path, final: Path) -> None:
    """Rename ``aside`` to ``final``, in place of a checkpoint that is there, then move ``latest``.

    Every file is on the disk before the rename, and the rename before ``latest`` moves. So a crash at any moment leaves
    ``latest`` on a complete checkpoint.
    """
    if not any(aside.iterdir()):
        raise CheckpointError(f"nothing was written to {aside}, so it is no checkpoint")
    sync_tree(aside)
    replaced = final.with_name(f".{final.name}.old")
    remove(replaced)
    if final.exists():
        final.rename(replaced)
    aside.rename(final)
    sync_folder(final.parent)
    link = final.with_name(".latest.tmp")
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(final.with_name("latest"))
    sync_folder(final.parent)
    remove(replaced)
