"""TensorBoard, W&B and Trackio. Each package is imported when its sink is built, and named if it is missing."""

import importlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

from podium.errors import ConfigError
from podium.extras import install_command
from podium.installed import has_library
from podium.secrecy import mask
from podium.telemetry.events import (
    CompletionsSampled,
    EvalFinished,
    Event,
    PhaseStarted,
    Recovered,
    RunSummarized,
    Sample,
    StepFinished,
)
from podium.telemetry.sinks import TrackedRun, Tracker

__all__ = ["TensorBoardSink", "TrackerSink", "TrackioSink", "WandbSink"]

_COLUMNS: Final = ("prompt", "completion", "reward", "expected")
_STEP: Final = "step"  # the axis of a run of W&B
_SUMMARY: Final = "summary/"


class TrackerSink(Tracker):
    """Scalars over steps, samples, and at the end a summary. A second phase continues the count of the first, because
    trackers have a single axis. A phase that has lost a worker and begins again keeps its steps.
    """

    package = ""

    def __init__(self) -> None:
        super().__init__()
        self._offset = 0
        self._last = 0
        self._begins_again = False
        self._drawn: dict[int, tuple[Sample, ...]] = {}  # ahead of the steps that are trained; W&B takes steps in order

    @classmethod
    def check(cls) -> None:
        if not has_library(cls.package):
            raise ConfigError(f"run.trackers names {cls.package}, which is not installed: {_install(cls.package)}")

    def _require(self, module: str) -> Any:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"{type(self).__name__} needs the package {self.package!r}, which cannot be imported here ({error}): "
                f"{_install(self.package)}"
            ) from error

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record finite `values` at `step`."""

    def log_samples(self, name: str, step: int, samples: tuple[Sample, ...]) -> None:
        """Record completions at `step` as `name`; a tracker without tables leaves them out."""

    def log_summary(self, step: int, figures: Mapping[str, float | str], curve: str) -> None:
        """Record the figures of a run that ended after `step`, and the picture at the path `curve` unless it is ""."""

    def begin(self, first_step: int) -> None:
        """Prepare for steps from `first_step`. A resumed run may have recorded that step before it was killed."""

    def handle(self, event: Event) -> None:
        match event:
            case Recovered():
                self._begins_again = True
            case PhaseStarted(first_step=first):
                # The last step of the phase before; 0 for the first phase, also in a run that is resumed.
                self._offset = self._last if first == 1 and not self._begins_again else self._offset
                self._begins_again = False
                self.begin(self._offset + first)
            case StepFinished(step=step, metrics=values):
                self._last = self._offset + step
                self.log(self._last, {name: float(value) for name, value in values.items() if math.isfinite(value)})
                self._log_drawn()
            case EvalFinished():
                self._log_evaluation(event)
            case CompletionsSampled(step=step, samples=samples):
                self._drawn[self._offset + step] = samples
                self._log_drawn()
            case RunSummarized(step=step, figures=figures, curve=curve):
                finite = {name: value for name, value in figures.items() if value is not None and _is_finite(value)}
                self.log_summary(self._offset + step, finite, curve)
            case _:
                pass

    def _log_drawn(self) -> None:
        for step in [step for step in self._drawn if step <= self._last]:
            self.log_samples("samples", step, self._drawn.pop(step))

    def _log_evaluation(self, event: EvalFinished) -> None:
        step = self._offset + event.step
        values = {f"eval/{name}": value for name, value in event.figures.items()}
        sets = {
            f"eval/{evaluation.name}" if evaluation.name else "eval": evaluation
            for evaluation in (event, *event.others)
        }
        for name, evaluation in sets.items():
            values |= {f"{name}/{figure}": value for figure, value in evaluation.figures.items()}
        self.log(step, {name: value for name, value in values.items() if math.isfinite(value)})
        for name, evaluation in sets.items():
            if evaluation.samples:
                self.log_samples(f"{name}/samples", step, evaluation.samples)


class TensorBoardSink(TrackerSink):
    """Event files in `folder`: ``tensorboard --logdir FOLDER``. `config` are the hyperparameters, nested. With
    `is_resumed`, the folder has those of the same run, which may begin again at its first step."""

    package = "tensorboard"

    def __init__(
        self, folder: str | Path, config: Mapping[str, Any] | None = None, *, is_resumed: bool = False
    ) -> None:
        super().__init__()
        self._is_resumed = is_resumed
        self._require("tensorboard")
        self._make = self._require("torch.utils.tensorboard").SummaryWriter
        self._folder, self._config = str(folder), dict(_leaves(mask(config or {})))
        self._made: Any = None

    @classmethod
    def of_run(cls, run: TrackedRun) -> Self:
        return cls(run.make_folder("tensorboard"), config=run.config, is_resumed=run.is_resumed)

    def begin(self, first_step: int) -> None:
        if self._made is None and (first_step > 1 or self._is_resumed):
            # What a killed run wrote of these steps is not shown. The first evaluation is before step 1.
            step = first_step if first_step > 1 else 0
            self._made = self._make(self._folder, flush_secs=10, purge_step=step)

    @property
    def _writer(self) -> Any:
        if self._made is None:
            self._made = self._make(self._folder, flush_secs=10)
        return self._made

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, name: str, step: int, samples: tuple[Sample, ...]) -> None:
        for number, sample in enumerate(samples, 1):
            expected = "" if sample.expected is None else f"expected\n{sample.expected}\n"
            shown = f"reward\n{sample.reward:g}\n{expected}prompt\n{sample.prompt}\ncompletion\n{sample.completion}"
            lines = [f"    {line}" for line in shown.splitlines()]  # four spaces make a line of Markdown verbatim
            self._writer.add_text(f"{name}/{number}", "\n".join(lines), step)

    def log_summary(self, step: int, figures: Mapping[str, float | str], curve: str) -> None:
        table = "\n".join(f"| {name} | {_show(value)} |".replace("\n", " ") for name, value in figures.items())
        self._writer.add_text("summary", f"| figure | value |\n|---|---|\n{table}", step)
        numbers = {
            _SUMMARY + name: float(figure) for name, figure in figures.items() if isinstance(figure, int | float)
        }
        plain = {
            name: setting if isinstance(setting, bool | int | float | str) else str(setting)
            for name, setting in self._config.items()
        }
        self._writer.add_hparams(plain, numbers, run_name=".", global_step=step)
        if curve:
            from PIL import Image  # matplotlib, which drew the picture, needs it too

            with Image.open(curve) as picture:
                self._writer.add_image("curve", _pixels(picture.convert("RGB")), step, dataformats="HWC")

    def finish(self) -> None:
        self._writer.close()


class _RunSink(TrackerSink):
    """A tracker whose ``init`` returns a run. `options` go to ``init``."""

    def __init__(
        self, project: str, *, name: str | None = None, config: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__()
        self._module = self._require(self.package)
        self._run = self._module.init(project=project, name=name, config=mask(config or {}), **options)

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Record values of any type at `step`, which a resumed run may have recorded before it was killed."""
        self._run.log(dict(values), step=step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.record(step, values)

    @abstractmethod
    def table(self, rows: list[dict[str, Any]]) -> Any:
        """Make a table of the tracker's own of rows that all have the same columns."""

    def log_samples(self, name: str, step: int, samples: tuple[Sample, ...]) -> None:
        rows = [{column: getattr(sample, column) for column in _COLUMNS} for sample in samples]
        self.record(step, {name: self.table(rows)})

    def _log_curve(self, step: int, curve: str) -> None:
        if curve:
            self.record(step, {"curve": self._module.Image(curve)})


class WandbSink(_RunSink):
    """A Weights & Biases run in `folder`; `options` go to ``wandb.init``: ``mode="offline"``, ``id``, ``resume``, …"""

    package = "wandb"

    def __init__(self, project: str, *, folder: str | Path | None = None, **options: Any) -> None:
        if folder is not None:
            options["dir"] = str(folder)
        super().__init__(project, **options)
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Record `values` with their step as the axis. W&B drops what comes at an earlier step of its own axis."""
        self._run.log({**values, _STEP: step})

    @classmethod
    def of_run(cls, run: TrackedRun) -> Self:
        run.make_folder("wandb")
        return cls(
            folder=run.path,
            name=run.name,
            config=run.config,
            id=run.read_id(),
            resume="allow",
            **{name: run.options[name] for name in ("project", "entity", "group", "tags") if run.options[name]},
        )

    def table(self, rows: list[dict[str, Any]]) -> Any:
        return self._module.Table(columns=list(_COLUMNS), data=[list(row.values()) for row in rows])

    def log_summary(self, step: int, figures: Mapping[str, float | str], curve: str) -> None:
        self._log_curve(step, curve)
        self._run.summary.update({_SUMMARY + name: value for name, value in figures.items()})

    def finish(self) -> None:
        self._run.finish()


class TrackioSink(_RunSink):
    """A Trackio run, kept on this machine: ``trackio show``. `options` go to ``trackio.init``."""

    package = "trackio"

    @classmethod
    def of_run(cls, run: TrackedRun) -> Self:
        options = {name: run.options[name] for name in ("project", "group") if run.options[name]}
        return cls(name=run.name, config=run.config, **({"resume": "allow"} if run.is_resumed else {}), **options)

    def table(self, rows: list[dict[str, Any]]) -> Any:
        return self._module.Table(data=rows)

    def log_summary(self, step: int, figures: Mapping[str, float | str], curve: str) -> None:
        rows = [{"figure": name, "value": _show(value)} for name, value in figures.items()]
        numbers = {
            _SUMMARY + name: float(figure) for name, figure in figures.items() if isinstance(figure, int | float)
        }
        self.record(step, {**numbers, "summary": self.table(rows)})
        self._log_curve(step, curve)

    def finish(self) -> None:
        # The module's own: a finished run that Trackio still holds is finished again at exit.
        self._module.finish()


def _install(package: str) -> str:
    return install_command(package, package="podium-trackers")


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by the dotted paths of their keys."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _is_finite(value: float | str) -> bool:
    return isinstance(value, str) or math.isfinite(value)


def _show(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _pixels(picture: Any) -> Any:
    import numpy as np

    return np.asarray(picture)
