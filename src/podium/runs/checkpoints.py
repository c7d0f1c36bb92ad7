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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from podium.errors import CheckpointError
from podium.runs.evaluation import Evaluation
from podium.runs.files import STATE_FILE, remove, step_name, step_of, sync_folder, sync_tree
from podium.telemetry import CheckpointSaved, Sample, emit
from podium.telemetry.held_out import ACCURACY, REWARD, Metric

__all__ = ["Checkpoints", "StoredCheckpoints", "TrainerState"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The state of the controller. Seeds need no state, because the random numbers of a step depend only on the seed
    and the step.

    Attributes:
        step: The last step that is finished.
        prompts: Place in the stream of prompts or examples, after those of ``step``.
        kl_coef: Coefficient of the KL, from its controller.
        metric: The name of the figure that judges the run; "" before an evaluation has decided that.
        first, last, best: Evaluations of the set that judges the run, which may be the same one. Best is the first one
            with the best figure, and has no scores.
        waited: Evaluations since the best one.
        wall_s: Seconds of training so far.
        stage_s, stage_tokens: Totals by stage, for the speeds in the summary.
        ledger: Length of the ledger's file in bytes; 0 in checkpoints that were written before runs had a ledger.
        given: Names of the functions and classes that a script gave the run beside its configuration.
    """

    step: int = 0
    prompts: Mapping[str, Any] = field(default_factory=dict)
    kl_coef: float = 0.0
    metric: str = ""
    first: Evaluation | None = None
    last: Evaluation | None = None
    best: Evaluation | None = None
    waited: int = 0
    wall_s: float = 0.0
    stage_s: Mapping[str, float] = field(default_factory=dict)
    stage_tokens: Mapping[str, float] = field(default_factory=dict)
    ledger: int = 0
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def judge(self) -> Metric:
        """The metric that judges the run. Before an evaluation has decided that, all scores are 0."""
        undecided = ACCURACY if self.last is not None and ACCURACY in self.last.figures else REWARD
        return Metric(self.metric or undecided)

    def after(self, evaluation: Evaluation, metric: Metric) -> TrainerState:
        """Return this after one more evaluation, which ``metric`` judges."""
        name, best = metric.name, self.best
        if best is None or metric.rank(evaluation.value(name)) > metric.rank(best.value(name)):
            best, waited = evaluation.without_scores, 0
        else:
            waited = self.waited + 1
        return replace(self, first=self.first or evaluation, last=evaluation, best=best, waited=waited)

    def judged_by(self, figure: str, set_name: str) -> TrainerState:
        """Return this for a run that is judged by ``figure`` of the evaluation set ``set_name`` from now on.

        ``figure`` is "auto" where an evaluation decides. Evaluations of another set, or without the figure, are
        forgotten, and the best of the others is chosen anew.
        """
        if figure in ("auto", self.metric) and (self.last is None or self.last.set_name == set_name):
            return self
        name = self.metric if figure == "auto" else figure
        first, last = (
            evaluation if evaluation and evaluation.set_name == set_name and name in evaluation.figures else None
            for evaluation in (self.first, self.last)
        )
        evaluations = [evaluation for evaluation in (first, last) if evaluation is not None]
        best = max(evaluations, key=lambda evaluation: Metric(name).rank(evaluation.value(name)), default=None)
        return replace(
            self,
            metric=name if evaluations else "",
            first=first,
            last=last,
            best=best and best.without_scores,
            waited=0,
        )

    @staticmethod
    def read(path: Path) -> TrainerState:
        """Read the state in the file at ``path``. Raises CheckpointError for anything else."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            for name in ("first", "last", "best"):
                if (evaluation := values[name]) is not None:
                    if "figures" not in evaluation:
                        raise CheckpointError(
                            f"{path} was written by an earlier Podium, whose runs had no eval.metric: resume the run "
                            "with that version, or begin a new run with this checkpoint's policy/ as its model.path"
                        )
                    samples = tuple(Sample(**sample) for sample in evaluation["samples"])
                    values[name] = Evaluation(
                        **{**evaluation, "samples": samples, "weights": tuple(evaluation["weights"])}
                    )
            return TrainerState(**values)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is not the state of a training run: {error}") from error


class StoredCheckpoints:
    """Reads the complete checkpoints in ``folder``. It writes nothing, so the run may continue meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        steps = {entry: step_of(entry.name) for entry in entries}
        return sorted((entry for entry in steps if steps[entry] is not None), key=lambda entry: steps[entry] or 0)

    def latest(self) -> Path | None:
        """Return the checkpoint that ``latest`` names, or the newest one if that was deleted; None if there is none."""
        link, checkpoints = self.folder / "latest", self.all()
        newest = checkpoints[-1] if checkpoints else None
        if link.is_symlink():
            named = self.folder / Path(os.readlink(link)).name
            if named in checkpoints:
                return named
            _logger.warning("%s points at %s, which is gone; using %s", link, named, newest)
        return newest

    def best(self) -> Path | None:
        """Return the best checkpoint by the metric of the newest, the newest of equals; None if none was measured."""
        return next(iter(self.ranked()), None)

    def ranked(self) -> list[Path]:
        """Return the checkpoints whose step was evaluated, the best first by the metric of the newest one.

        While a run has not decided what judges it, all figures are 0.
        """
        states: list[tuple[TrainerState, Path]] = []
        for path in self.all():
            with suppress(CheckpointError):
                states.append((TrainerState.read(path / STATE_FILE), path))
        metric = Metric(next((state.metric for state, _ in reversed(states) if state.metric), REWARD))
        scores = [
            (metric.rank(state.last.figures[metric.name]), state.step, path)
            for state, path in states
            if state.last is not None and state.last.step == state.step and metric.name in state.last.figures
        ]
        return [path for *_, path in sorted(scores, reverse=True)]


class Checkpoints(StoredCheckpoints):
    """The checkpoints that a run writes into ``folder``, which is created if it is missing."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.tidy()

    @contextmanager
    def writing(self, step: int, *, keep: int = 0, keep_best: int = 0) -> Iterator[Path]:
        """Yield a folder for the checkpoint of ``step``. After the block the checkpoint is complete, and ``latest``
        names it. Then all checkpoints are removed except the ``keep`` newest and the ``keep_best`` best. ``keep`` of 0
        removes none.

        If the block raises an error, or the disk refuses a write, the folder is removed.
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
        """Remove what is left of a checkpoint whose process was killed while it wrote."""
        for half in self.folder.glob(".*.tmp"):
            remove(half)
        for replaced in self.folder.glob(".step-*.old"):
            final = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".old"))
            if final.exists():
                remove(replaced)
            else:
                replaced.rename(final)  # killed between the two renames: the old one is the newest complete one


def _commit(aside: Path, final: Path) -> None:
    """Rename ``aside`` to ``final``, which replaces an older checkpoint of this step, and then move ``latest``.

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
    if latest.is_dir() and not latest.is_symlink():  # the run was copied without its links
        remove(latest)
    link.replace(latest)
    sync_folder(final.parent)
    remove(replaced)
