"""TensorBoard, W&B and Trackio. Each package is imported when its sink is built, and named if it is missing."""

import importlib
import math
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.telemetry.events import CompletionsSampled, EvalFinished, Event, PhaseStarted, Sample, StepFinished
from podium.telemetry.sinks.base import Sink

__all__ = ["TensorBoardSink", "TrackerSink", "TrackioSink", "WandbSink"]


class TrackerSink(Sink):
    """Scalars over steps. A second phase goes on counting where the first ended, since trackers want one axis."""

    def __init__(self) -> None:
        super().__init__()
        self._offset = 0
        self._last = 0

    def _require(self, module: str, package: str) -> Any:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"{type(self).__name__} needs the package {package!r}, which cannot be imported here ({error}): "
                f"pip install {package}"
            ) from error

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record finite `values` at `step`."""

    def log_samples(self, step: int, samples: tuple[Sample, ...]) -> None:
        """Record completions at `step`; a tracker without tables leaves them out."""

    def handle(self, event: Event) -> None:
        match event:
            case PhaseStarted(first_step=first):
                # The last step of the phase before; 0 for the first phase, also in a run that is resumed.
                self._offset = self._last if first == 1 else self._offset
            case StepFinished(step=step, metrics=values):
                self._last = self._offset + step
                self.log(self._last, {name: float(value) for name, value in values.items() if math.isfinite(value)})
            case EvalFinished(step=step, accuracy=accuracy, reward_mean=reward):
                values = {"eval/accuracy": accuracy, "eval/reward_mean": reward}
                for one in (event, *event.others) if event.name else ():
                    values |= {
                        f"eval/{one.name}/accuracy": one.accuracy,
                        f"eval/{one.name}/reward_mean": one.reward_mean,
                    }
                self.log(self._offset + step, values)
            case CompletionsSampled(step=step, samples=samples):
                self.log_samples(self._offset + step, samples)
            case _:
                pass


class TensorBoardSink(TrackerSink):
    """Event files in `folder`: ``tensorboard --logdir FOLDER``."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self._require("tensorboard", "tensorboard")
        writer = self._require("torch.utils.tensorboard", "tensorboard")
        self._writer = writer.SummaryWriter(str(folder), flush_secs=10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: tuple[Sample, ...]) -> None:
        for number, sample in enumerate(samples, 1):
            shown = f"reward\n{sample.reward:g}\nprompt\n{sample.prompt}\ncompletion\n{sample.completion}"
            lines = [f"    {line}" for line in shown.splitlines()]  # four spaces make a line of Markdown verbatim
            self._writer.add_text(f"samples/{number}", "\n".join(lines), step)

    def finish(self) -> None:
        self._writer.close()


class _RunSink(TrackerSink):
    """A tracker whose ``init`` returns a run. `options` go to ``init``."""

    package = ""

    def __init__(
        self, project: str, *, name: str | None = None, config: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__()
        self._module = self._require(self.package, self.package)
        self._run = self._module.init(project=project, name=name, config=dict(config or {}), **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)


class WandbSink(_RunSink):
    """A Weights & Biases run in `folder`; `options` go to ``wandb.init``: ``mode="offline"``, ``id``, ``resume``, …"""

    package = "wandb"

    def __init__(self, project: str, *, folder: str | Path | None = None, **options: Any) -> None:
        if folder is not None:
            options["dir"] = str(folder)
        super().__init__(project, **options)

    def log_samples(self, step: int, samples: tuple[Sample, ...]) -> None:
        rows = [[sample.prompt, sample.completion, sample.reward, sample.expected] for sample in samples]
        table = self._module.Table(columns=["prompt", "completion", "reward", "expected"], data=rows)
        self._run.log({"samples": table}, step=step)

    def finish(self) -> None:
        self._run.finish()


class TrackioSink(_RunSink):
    """A Trackio run, kept on this machine: ``trackio show``. `options` go to ``trackio.init``."""

    package = "trackio"

    def finish(self) -> None:
        # The module's own: a finished run that Trackio still holds is finished again at exit.
        self._module.finish()
