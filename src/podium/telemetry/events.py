"""The events of a run, as frozen records.

Times ending in ``_ns`` are CLOCK_MONOTONIC nanoseconds (``time.monotonic_ns``): on Linux that clock is shared by all
processes of one machine, so a worker's times and the controller's times lie on one axis.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["CallFinished", "CheckpointSaved", "CompletionsSampled", "EvalFinished", "Event", "Note", "PhaseStarted"]
__all__ += [
    "Count",
    "OutputLost",
    "PhaseFinished",
    "Progressing",
    "Recovered",
    "RunSummarized",
    "Sample",
    "StageFinished",
    "Stalled",
    "StepFinished",
    "Waiting",
]
__all__ += ["WorkerLost", "WorkerStarted"]


class Event:
    """Anything that can happen in a run."""


@dataclass(frozen=True)
class CallFinished(Event):
    """One rank answered one call. ``submitted_ns`` was taken in the controller, the other two in the worker.

    ``call_id`` is the same for all ranks of a call.
    """

    role: str
    method: str
    rank: int
    node: str
    call_id: int
    submitted_ns: int
    started_ns: int
    ended_ns: int
    ok: bool


@dataclass(frozen=True)
class WorkerStarted(Event):
    """A worker's constructor returned on ``rank``."""

    role: str
    rank: int
    node: str
    pid: int


@dataclass(frozen=True)
class Count:
    """``done`` of ``total`` things of a kind, ``seconds`` after the first one was begun. A ``total`` of 0 is not known.

    ``unit`` is a plural such as "completions"; ``stage`` is the stage of a step that this is, if it is a whole one.
    Counts of the same unit are parts of one that is ``whole``. In a worker, ``role`` and ``rank`` are its own.
    """

    unit: str
    done: int
    total: int
    seconds: float
    stage: str = ""
    whole: bool = False
    role: str = ""
    rank: int = 0


@dataclass(frozen=True)
class Progressing(Event):
    """What is being counted in the controller and in workers whose calls take long. It is empty after the last of it.

    It comes twice a second while something takes long, and not at all where nothing does.
    """

    counts: tuple[Count, ...]


@dataclass(frozen=True)
class WorkerLost(Event):
    """A worker's process ended although nobody had asked it to. ``cause`` reads "signal SIGKILL"."""

    role: str
    rank: int
    node: str
    cause: str


@dataclass(frozen=True)
class Stalled(Event):
    """A call has been waiting for ``seconds``; ``waiting_for`` are the ranks that have not answered.

    ``report`` is not empty once half of the call's deadline has passed. It says what each of these ranks runs.
    """

    role: str
    method: str
    waiting_for: tuple[int, ...]
    seconds: float
    report: str = ""


@dataclass(frozen=True)
class PhaseStarted(Event):
    """The steps that follow belong to ``name`` ("sft", "grpo", "ppo"); the last of them is number ``total_steps``.

    ``first_step`` is above 1 when the run was resumed.
    """

    name: str
    total_steps: int
    first_step: int = 1


@dataclass(frozen=True)
class PhaseFinished(Event):
    """No step of ``name`` follows. What is shown next, such as the report, has the terminal to itself."""

    name: str


@dataclass(frozen=True)
class RunSummarized(Event):
    """The run ended after ``step``. ``figures`` are numbers and texts of its summary by name; None is not measured.

    ``curve`` is the path of the learning curve's picture; "" where there is none.
    """

    step: int
    figures: Mapping[str, float | str | None]
    curve: str = ""


@dataclass(frozen=True)
class Waiting(Event):
    """The run does ``what`` before its first step: "loading the model". Of ``total`` parts, ``completed`` are done.

    ``total`` is 0 where the parts are not counted.
    """

    what: str
    completed: int = 0
    total: int = 0


@dataclass(frozen=True)
class StageFinished(Event):
    """One stage of a step ("generate", "update") ended in the controller.

    ``half`` is the half of the step that the stage belongs to: "collect" or "learn". Stages of one half never overlap.
    """

    name: str
    step: int
    started_ns: int
    ended_ns: int
    half: str = "learn"


@dataclass(frozen=True)
class StepFinished(Event):
    """A training step ended. The names in ``metrics`` are those of `podium.telemetry.metrics`, and any others."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class EvalFinished(Event):
    """A held-out evaluation over ``items`` prompts or examples ended. ``figures`` are its results by the names of
    :mod:`podium.telemetry.held_out`.

    The figure ``metric`` judges the run, and ``interval`` is its 95 % interval; None where it is not known. It is over
    the ``scored`` items, those that the reward did not leave out; None for all.
    Where there are several evaluation sets, each has a ``name``. This is the one that judges the run, and ``others``
    are the rest. ``samples`` are the completions of the set's first prompts.
    """

    step: int
    items: int
    figures: Mapping[str, float]
    metric: str = "accuracy"
    interval: tuple[float, float] | None = None
    name: str = ""
    others: tuple["EvalFinished", ...] = ()
    samples: tuple["Sample", ...] = ()
    scored: int | None = None


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A complete checkpoint of ``step`` lies at ``path``."""

    step: int
    path: str


@dataclass(frozen=True)
class Sample:
    """One completion as a person reads it. ``place`` is that of its prompt in the evaluation or the step, ``details``
    the parts of the reward and the texts that it logged. ``cut_off``: it reached the limit of its tokens."""

    prompt: str
    completion: str
    reward: float
    expected: str | None = None
    place: int | None = None
    details: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    cut_off: bool = False


@dataclass(frozen=True)
class CompletionsSampled(Event):
    """A few completions of ``step``, emitted when the user asked to see them."""

    step: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class OutputLost(Event):
    """What is shown cannot be written any more, for ``reason``: a pipe's reader has ended, or a disk is full."""

    reason: str


@dataclass(frozen=True)
class Note(Event):
    """A sentence for the person who watches the run."""

    text: str


@dataclass(frozen=True)
class Recovered(Note):
    """The run goes on after it has lost a worker."""
