"""metrics.jsonl has one JSON object on a line for every step and evaluation. It is complete before each checkpoint."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from podium.telemetry.events import EvalFinished, Event, PhaseStarted, StepFinished
from podium.telemetry.sinks.base import Sink

STEP_FIELDS: Final = frozenset({"kind", "phase", "step", "time", "nonfinite"})
"""The fields of a step's row that are no metrics."""


class JsonlSink(Sink):
    """Appends to the file at `path`, or to `file` if that is open for reading and appending already.

    Every row has ``kind`` ("step" or "eval"), ``phase`` (of the last PhaseStarted, else null), ``step`` and ``time``
    (of the event, in unix seconds). A step's metrics stand beside them under their own names; an evaluation adds
    ``items``, its figures, the name of the ``metric`` that judges the run, and the bounds ``low`` and ``high`` of that.
    """

    def __init__(self, path: str | Path, file: IO[bytes] | None = None) -> None:
        super().__init__()
        self.path = Path(path)
        self._phase: str | None = None
        if file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab+") if file is None else file
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # a run that was killed left half a line; what follows starts a new one
                self._file.write(b"\n")

    def handle(self, event: Event) -> None:
        match event:
            case PhaseStarted(name=name):
                self._phase = name
            case StepFinished(step=step, metrics=metrics):
                self._write("step", step, metrics)
            case EvalFinished(step=step, metric=metric):
                sets = [("", event)] + [
                    (f"/{evaluation.name}", evaluation) for evaluation in (event, *event.others) if evaluation.name
                ]
                figures = {
                    name + suffix: value
                    for suffix, evaluation in sets
                    for name, value in {**evaluation.figures, "items": evaluation.items}.items()
                }
                if event.interval is not None:
                    figures |= dict(zip(("low", "high"), event.interval, strict=True))
                self._write("eval", step, figures, {"metric": metric})
            case _:
                pass

    def _write(
        self, kind: str, step: int, metrics: Mapping[str, float], texts: Mapping[str, str] | None = None
    ) -> None:
        age_s = (time.monotonic_ns() - self.emitted_ns) / 1e9
        row = {"kind": kind, "phase": self._phase, "step": step, "time": round(time.time() - age_s, 3), **(texts or {})}
        # The first four names are ours: a metric that is called "step" does not hide the step.
        row |= {name: value for name, value in _finite(metrics).items() if name not in row}
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def finish(self) -> None:
        self._file.close()


def _finite(metrics: Mapping[str, float]) -> dict[str, Any]:
    """`metrics` as JSON can hold them: what is not finite becomes null and is named under "nonfinite".

    ``{"loss": nan, "lr": 0.1}`` -> ``{"loss": None, "lr": 0.1, "nonfinite": {"loss": "nan"}}``. Numbers of any kind
    (NumPy, one-element tensors) become floats or ints. Anything else raises TypeError with the metric's name.
    """
    row: dict[str, Any] = {}
    for name, value in metrics.items():
        try:
            row[name] = int(value) if isinstance(value, int) else float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"metric {name!r} is no number but {type(value).__name__}: {value!r}") from error
    nonfinite = {name: str(value) for name, value in row.items() if not math.isfinite(value)}
    return row | dict.fromkeys(nonfinite) | ({"nonfinite": nonfinite} if nonfinite else {})
