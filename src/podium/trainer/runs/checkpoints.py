"""Checkpoints of a run hold all that the next step depends on. A checkpoint is complete, or it is not there.

A checkpoint is data: reading one runs no code, whoever wrote it. A file that is not as it was written is refused.

checkpoints/step-000012/
  trainer.json      step, place in the data, coefficients, evaluations so far, time spent
  policy/ critic/   the model with its tokenizer, as transformers loads it (adapters: as peft loads them)
    resume/         optimizer, step count and random state
    manifest.json   the size and checksum of each file in this directory
  manifest.json     those of trainer.json
checkpoints/latest  a link to the newest

The state is copied first, in the memory of the workers, while nothing updates it. The rest runs beside the next steps:

    trainer   step 10 │ copy │ step 11   step 12   step 13 …                                step 20 │ copy │ step 21 …
    a thread                 │ write aside ─▶ sync every file ─▶ rename ─▶ move `latest` ─▶ remove what is beyond `keep`

One checkpoint is written at a time. A save that is due while the one before is being written waits for it, so that none
is left out. The run waits for its last one before it ends, also when it ends by an error.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import CheckpointError, EndpointError, PodiumError
from podium.telemetry import CheckpointSaved, Sample, emit
from podium.trainer.config import SaveConfig
from podium.trainer.evaluate import Evaluation
from podium.trainer.files import STATE_FILE, remove, step_name, step_of, sync_folder, sync_tree
from podium.trainer.schedules.steps import named_stage
from podium.workers.manifest import check_manifest, explain, file_sums, write_manifest

if TYPE_CHECKING:
    from podium.runtime import Call
    from podium.trainer.roles import Roles

__all__ = ["Checkpoints", "Saver", "StoredCheckpoints", "TrainerState", "load_checkpoint"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The state of the controller. Seeds need no state: what is drawn at a step depends on the seed and the step alone.

    Attributes:
        step: The last step that is finished.
        prompts: Place in the stream of prompts or examples, after those of ``step``.
        kl_coef: Coefficient of the KL, from its controller.
        first, last, best: Evaluations, which may be the same one. Best is the first one with the highest accuracy.
        waited: Evaluations since the best one.
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
    best: Evaluation | None = None
    waited: int = 0
    wall_s: float = 0.0
    stage_s: Mapping[str, float] = field(default_factory=dict)
    stage_tokens: Mapping[str, float] = field(default_factory=dict)
    ledger: int = 0
    given: Mapping[str, str] = field(default_factory=dict)

    def after(self, found: Evaluation) -> TrainerState:
        """Return this after one more evaluation."""
        better = self.best is None or found.accuracy > self.best.accuracy
        best, waited = (found, 0) if better else (self.best, self.waited + 1)
        return replace(self, first=self.first or found, last=found, best=best, waited=waited)

    @staticmethod
    def read(path: Path) -> TrainerState:
        """Read the state in the file at ``path``. Raises CheckpointError for anything else."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            values = {"best": None, **values}  # checkpoints once had no best
            for name in ("first", "last", "best"):
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
    state = TrainerState.read(path / STATE_FILE)
    for name, worker in roles.learners.items():
        if not (path / name).is_dir():
            raise CheckpointError(f"{path} holds no {name}, and this configuration has one")
        worker.load(str(path.absolute() / name))
    return state


class StoredCheckpoints:
    """The complete checkpoints in ``folder``. Nothing is written, so that the run may go on meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        found = {entry: step_of(entry.name) for entry in entries}
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
        return next(iter(self.ranked()), None)

    def ranked(self) -> list[Path]:
        """Return the checkpoints whose step was evaluated, the best first."""
        found: list[tuple[float, int, Path]] = []
        for path in self.all():
            with suppress(CheckpointError):
                state = TrainerState.read(path / STATE_FILE)
                if state.last is not None and state.last.step == state.step:
                    found.append((state.last.accuracy, state.step, path))
        return [path for *_, path in sorted(found, reverse=True)]


class Checkpoints(StoredCheckpoints):
    """The checkpoints that a run writes into ``folder``, which is created if it is missing."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.tidy()

    @contextmanager
    def writing(self, step: int, *, keep: int = 0, keep_best: int = 0) -> Iterator[Path]:
        """Give a folder to write the checkpoint of ``step`` into, which is complete and ``latest`` after the block.
        Then remove all but the ``keep`` newest and the ``keep_best`` best. ``keep`` of 0 removes none.

        If the block raises, or the disk refuses, nothing remains of the folder.
        """
        aside, final = self.folder / f".{step_name(step)}.tmp", self.folder / step_name(step)
        remove(aside)
        aside.mkdir()
        try:
            yield aside
            _commit(aside, final)
        except BaseException:
            with suppress(OSError):  # the error of the block counts; a later start removes what is left
                remove(aside)
            raise
        emit(CheckpointSaved(step, str(final)))
        kept = {final, *self.ranked()[:keep_best]}
        for old in self.all()[:-keep] if keep > 0 else []:
            if old not in kept:
                remove(old)

    def tidy(self) -> None:
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
    latest = final.with_name("latest")
    if latest.is_dir() and not latest.is_symlink():  # a run that was copied with what its links led to
        remove(latest)
    link.replace(latest)
    sync_folder(final.parent)
    remove(replaced)


class Saver:
    """Writes the checkpoints of one run.

    Args:
        checkpoints: Where they go.
        config: Which of them are kept.
        texts: Files that belong into the directory of the policy beside those of its workers, by name.
        beside: Whether they are written beside the next steps; otherwise a save returns when it is complete.
    """

    def __init__(
        self, checkpoints: Checkpoints, config: SaveConfig, texts: Mapping[str, str] | None = None, *, beside: bool
    ) -> None:
        self._texts = texts or {}
        self._checkpoints, self._config, self._beside = checkpoints, config, beside
        self._thread = ThreadPoolExecutor(1, "save")
        self._writing: Future[None] | None = None

    def save(self, state: TrainerState, roles: Roles) -> None:
        """Copy what the learners hold, and begin to write it with ``state``. First wait for the checkpoint before.

        Raises:
            CheckpointError: The checkpoint before could not be written, or this one where it is not written beside.
        """
        self.wait()
        text = json.dumps(asdict(state), indent=1)
        folder = self._checkpoints.folder.absolute()  # a later start removes there what a worker that was killed left
        with self._telling(state.step):
            folder.mkdir(parents=True, exist_ok=True)
            for copied in [worker.copy_state.submit(str(folder)) for worker in roles.learners.values()]:
                copied.result()
        if self._beside:
            self._writing = self._thread.submit(self._write, state.step, text, roles)
        else:
            self._write(state.step, text, roles)

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, if there is one. It does not wait."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises:
            CheckpointError: It cannot be written. The one before is still the latest.
            PodiumError: A worker was lost that wrote it, or passed its deadline.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """End the thread, and remove what a rank went on writing after another one had failed. The workers are closed
        before, which ends what the thread still waits for."""
        self._thread.shutdown()
        with suppress(OSError):  # a later start tries again
            self._checkpoints.tidy()

    def _write(self, step: int, text: str, roles: Roles) -> None:
        config = self._config
        with (
            self._telling(step),
            named_stage("save", step),
            self._checkpoints.writing(step, keep=config.keep, keep_best=config.keep_best) as folder,
        ):
            _write_learners(folder.absolute(), roles, self._texts)  # a worker has a working directory of its own
            (folder / STATE_FILE).write_text(text, encoding="utf-8")
            write_manifest(folder, [file_sums([folder / STATE_FILE])])

    @contextmanager
    def _telling(self, step: int) -> Iterator[None]:
        """Say what went wrong, and from which checkpoint to resume."""
        try:
            yield
        except (OSError, CheckpointError, EndpointError) as error:
            cause = error.__cause__ if isinstance(error, EndpointError) and error.__cause__ is not None else error
            reason = f"{cause.filename}: {explain(cause)}" if isinstance(cause, OSError) else str(cause)
            if not isinstance(cause, OSError | PodiumError):
                reason = f"{type(cause).__name__}: {reason}"
            run, latest = self._checkpoints.folder.parent, self._checkpoints.latest()
            raise CheckpointError(
                f"the checkpoint of step {step} is not written: {reason}. "
                + (f"{latest} is whole: resume with --resume {run}" if latest else f"{run} has no checkpoint yet")
            ) from error


def _write_learners(folder: Path, roles: Roles, texts: Mapping[str, str]) -> None:
    """Have all learners write what they copied into ``folder``. All have ended when this returns or raises."""
    calls: dict[str, Call[list[dict[str, Any]]]] = {}
    failed: PodiumError | None = None
    for name, worker in roles.learners.items():
        try:
            calls[name] = worker.write_state.submit(str(folder / name))
        except PodiumError as error:
            failed = failed or error
    for name, call in calls.items():
        try:
            sums = call.result()
            if name == "policy":
                for file, text in texts.items():
                    (folder / name / file).write_text(text, encoding="utf-8")
                sums = [*sums, file_sums(folder / name / file for file in texts)]
            write_manifest(folder / name, sums)
        except PodiumError as error:
            failed = failed or error
    if failed is not None:
        raise failed
