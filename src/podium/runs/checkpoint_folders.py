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

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator

from podium.errors import CheckpointError, DataError
from podium.runs.evaluation import Evaluation, check_scores
from podium.runs.files import STATE_FILE, step_name, step_of
from podium.runs.run_files import RunFiles
from podium.runs.run_json import Amount, Count, read_json
from podium.telemetry import CheckpointSaved, emit
from podium.telemetry.held_out import ACCURACY, REWARD, Metric

_logger = logging.getLogger(__name__)
_LATEST: Final = "latest"


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The state of the controller. Seeds need no state, because the random numbers of a step depend only on the seed
    and the step.

    Attributes:
        step: The last step that is finished.
        prompts: Place in the stream of prompts or examples, after those of ``step``.
        kl_coef: Coefficient of the KL, from its controller.
        entropy: That of the entropy bonus (``coef``), and whether the bonus counts (``counts``), if it has a target.
        metric: The name of the figure that judges the run; "" before an evaluation has decided that.
        first, last, best: Evaluations of the set that judges the run, which may be the same one. Best is the first one
            with the best figure, and has no scores.
        waited: Evaluations since the best one.
        wall_s: Seconds of training so far.
        stage_s, stage_tokens: Totals by stage, for the speeds in the summary.
        ledger: Length of the ledger's file in bytes; 0 in checkpoints that were written before runs had a ledger.
        given: Names of the functions and classes that a script gave the run beside its configuration.
        configs: As :meth:`.RunDirectory.count_configs`; None in checkpoints that were written before it was counted.
        pass_rates: The running pass rates of examples, as :meth:`.PassRates.state` returns them.
    """

    step: Count = 0
    prompts: Mapping[str, int | str] = field(default_factory=dict[str, int | str])
    kl_coef: Amount = 0.0
    entropy: Mapping[str, Amount] = field(default_factory=dict[str, float])
    metric: str = ""
    first: Annotated[Evaluation, AfterValidator(check_scores)] | None = None
    last: Annotated[Evaluation, AfterValidator(check_scores)] | None = None
    best: Annotated[Evaluation, AfterValidator(check_scores)] | None = None
    waited: Count = 0
    wall_s: Amount = 0.0
    stage_s: Mapping[str, Amount] = field(default_factory=dict[str, float])
    stage_tokens: Mapping[str, Amount] = field(default_factory=dict[str, float])
    ledger: Count = 0
    given: Mapping[str, str] = field(default_factory=dict[str, str])
    configs: Count | None = None
    pass_rates: Mapping[str, Mapping[str, Amount]] = field(default_factory=dict[str, Mapping[str, float]])

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

    def judged_by(self, figure: str, set_name: str, rows: Sequence[Mapping[str, Any]] = ()) -> TrainerState:
        """Return this for a run that is judged by ``figure`` of the evaluation set ``set_name`` from now on.

        ``figure`` is "auto" where an evaluation decides. Evaluations of another set, or without the figure, are
        forgotten, and those of the ``rows`` of metrics.jsonl take their place. The best one is chosen anew among all,
        and ``eval.patience`` begins anew.
        """
        if figure in ("auto", self.metric) and (self.last is None or self.last.set_name == set_name):
            return self
        name = self.metric if figure == "auto" else figure
        evaluations = {evaluation.step: evaluation for evaluation in Evaluation.of_rows(rows, name, set_name)}
        for evaluation in filter(None, (self.first, self.last)):
            if evaluation.set_name == set_name and name in evaluation.figures:
                evaluations[evaluation.step] = evaluation
        first, last = (evaluations.get(choose(evaluations, default=-1)) for choose in (min, max))
        in_order = sorted(evaluations.values(), key=lambda evaluation: evaluation.step)
        best = max(in_order, key=lambda evaluation: Metric(name).rank(evaluation.value(name)), default=None)
        return replace(
            self,
            metric=name if evaluations else "",
            first=first,
            last=last,
            best=best and best.without_scores,
            waited=0,
        )

    @staticmethod
    def read(checkpoint: Path, files: RunFiles | None = None) -> TrainerState:
        """Read the state in the folder of a checkpoint, whose ``files`` may be open already. Raises CheckpointError for
        anything else."""
        try:
            return _read_state(checkpoint, files or files_of(checkpoint))
        except (OSError, DataError) as error:
            raise CheckpointError(f"this is not the state of a training run: {error}") from error


def files_of(checkpoint: Path) -> RunFiles:
    """Return the files of a checkpoint, whose folder is in that of its run's checkpoints."""
    folder = checkpoint.absolute()
    return RunFiles(folder.parent.parent, folder.parent.name, folder.name)


def _read_state(checkpoint: Path, files: RunFiles) -> TrainerState:
    file, content = checkpoint / STATE_FILE, files.read(STATE_FILE)
    state = read_json(TrainerState, content, file)
    if step_of(checkpoint.name) not in (None, state.step):
        raise DataError(f"{file}: step = {state.step}, and the folder is that of another step")
    return state


class StoredCheckpoints:
    """Reads the complete checkpoints in ``files``. It writes nothing, so the run may continue meanwhile."""

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.folder = files.path

    def all(self) -> list[Path]:
        """Return the complete checkpoints, oldest first. Raises DataError for a link in the place of one."""
        steps = {name: step for name in self.files.names() if (step := step_of(name)) is not None}
        return [self.folder / name for name in sorted(steps, key=steps.__getitem__)]

    def latest(self) -> Path | None:
        """Return the checkpoint that ``latest`` names, or the newest one if that was deleted; None if there is none."""
        checkpoints = self.all()
        newest = checkpoints[-1] if checkpoints else None
        if (target := self.files.read_link(_LATEST)) is not None:
            named = self.folder / Path(target).name
            if named in checkpoints:
                return named
            _logger.warning("%s points at %s, which is gone; using %s", self.folder / _LATEST, named, newest)
        return newest

    def best(self) -> Path | None:
        """Return the best checkpoint by the metric of the newest, the newest of equals; None if none was measured."""
        return next(iter(self.ranked()), None)

    def ranked(self) -> list[Path]:
        """Return the checkpoints whose step was evaluated, the best first by the metric of the newest one. Those that
        were judged by another evaluation set than the newest one are left out.

        While a run has not decided what judges it, all figures are 0.
        """
        states: list[tuple[TrainerState, Path]] = []
        for path in self.all():
            try:
                states.append((TrainerState.read(path, self.files.folder(path.name)), path))
            except CheckpointError as error:
                _logger.warning("%s counts for no choice of the best checkpoint: %s", path, error)
        metric = Metric(next((state.metric for state, _ in reversed(states) if state.metric), REWARD))
        judged = [(state.last, path) for state, path in states if state.last and state.last.step == state.step]
        set_name = judged[-1][0].set_name if judged else ""
        scores = [
            (metric.rank(last.figures[metric.name]), last.step, path)
            for last, path in judged
            if metric.name in last.figures and last.set_name == set_name
        ]
        return [path for *_, path in sorted(scores, reverse=True)]


class Checkpoints(StoredCheckpoints):
    """The checkpoints that a run writes into ``files``, whose folder is created if it is missing."""

    def __init__(self, files: RunFiles) -> None:
        super().__init__(files)
        files.make_folder()
        self.tidy()

    @contextmanager
    def writing(self, step: int, *, keep: int = 0, keep_best: int = 0) -> Iterator[Path]:
        """Yield a folder for the checkpoint of ``step``. After the block the checkpoint is complete, and ``latest``
        names it. Then all checkpoints are removed except the ``keep`` newest and the ``keep_best`` best. ``keep`` of 0
        removes none.

        If the block raises an error, or the disk refuses a write, the folder is removed.
        """
        aside, final = f".{step_name(step)}.tmp", step_name(step)
        path = self.files.renew_folder(aside)
        try:
            yield path
            self._commit(aside, final)
        except BaseException:
            with suppress(OSError):  # the error of the block counts; a later start removes what is left
                self.files.remove(aside)
            raise
        emit(CheckpointSaved(step, str(self.folder / final)))
        self.prune(keep, keep_best)

    def prune(self, keep: int, keep_best: int) -> None:
        """Remove all checkpoints except the latest one, the ``keep`` newest and the ``keep_best`` best. ``keep`` of 0
        removes none."""
        kept = {self.latest(), *self.ranked()[:keep_best]}
        for old in self.all()[:-keep] if keep > 0 else []:
            if old not in kept:
                self.files.remove(old.name)

    def tidy(self) -> None:
        """Remove what is left of a checkpoint whose process was killed while it wrote, and make a link ``latest`` that
        it had not made yet."""
        for name in self.files.names():
            if name.startswith(".") and name.endswith(".tmp"):
                self.files.remove(name)
            elif name.startswith(".") and name.endswith(".old") and step_of(final := name[1:-4]) is not None:
                if self.files.kind(final):
                    self.files.remove(name)
                else:
                    self.files.rename(name, final)  # killed between the two renames: this is the newest complete one
        if not self.files.kind(_LATEST) and (newest := self.latest()) is not None:
            self.files.link(newest.name, _LATEST)

    def _commit(self, aside: str, final: str) -> None:
        """Rename ``aside`` to ``final``, which replaces an older checkpoint of this step, and then move ``latest``.

        Every file is on the disk before the rename, and the rename before ``latest`` moves. So a crash at any moment
        leaves ``latest`` on a complete checkpoint.
        """
        if not self.files.names(aside):
            raise CheckpointError(f"nothing was written to {self.folder / aside}, so it is no checkpoint")
        self.files.sync_all(aside)
        self.files.remove(replaced := f".{final}.old")
        if self.files.kind(final):
            self.files.rename(final, replaced)
        self.files.rename(aside, final)
        self.files.sync()
        if self.files.is_folder(_LATEST):  # the run was copied without its links
            self.files.remove(_LATEST)
        self.files.link(final, _LATEST)
        self.files.sync()
        self.files.remove(replaced)
