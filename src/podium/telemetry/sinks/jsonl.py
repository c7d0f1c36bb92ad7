"""metrics.jsonl: one JSON object a line, one line a step and one an evaluation, on disk before the next step begins."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.telemetry.events import EvalFinished, Event, PhaseStarted, StepFinished
from podium.telemetry.sinks.base import Sink

__all__ = ["JsonlSink", "finite"]


def finite(metrics: Mapping[str, float]) -> dict[str, Any]:
    """`metrics` as JSON can hold them: what is not finite becomes null and is named under "nonfinite".

    ``{"loss": nan, "lr": 0.1}`` -> ``{"loss": None, "lr": 0.1, "nonfinite": {"loss": "nan"}}``. Numbers of any kind
    (NumPy, one-element tensors) become floats or ints; anything else raises TypeError with the metric's name.
    """
    row: dict[str, Any] = {}
    nonfinite: dict[str, str] = {}
    for name, value in metrics.items():
        if isinstance(value, int):
            row[name] = int(value)
            continue
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"metric {name!r} is no number but {type(value).__name__}: {value!r}") from error
        if math.isfinite(number):
            row[name] = number
        else:
            row[name] = None
            nonfinite[name] = str(number)
    if nonfinite:
        row["nonfinite"] = nonfinite
    return row


class JsonlSink(Sink):
    """Appends to the file at `path`.

    Every row has ``kind`` ("step" or "eval"), ``phase`` (of the last PhaseStarted, else null), ``step`` and ``time``
    (unix seconds). A step's metrics stand beside them under their own names; an evaluation adds ``accuracy``,
    ``items`` and ``reward_mean``.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._phase: str | None = None
        # A run that was killed may have left half a line; what follows must not be glued to it.
        glued = self.path.exists() and not _ends_with_newline(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        if glued:
            self._file.write("\n")

    def handle(self, event: Event) -> None:
        match event:
            case PhaseStarted(name=name):
                self._phase = name
            case StepFinished(step=step, metrics=metrics):
                self._write("step", step, finite(metrics))
            case EvalFinished(step=step, accuracy=accuracy, items=items, reward_mean=reward_mean):
                self._write("eval", step, finite({"accuracy": accuracy, "items": items, "reward_mean": reward_mean}))
            case _:
                pass

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        row = {"kind": kind, "phase": self._phase, "step": step, "time": round(time.time(), 3)}
        # The first four names are ours: a metric that is called "step" does not hide the step.
        self._file.write(json.dumps(row | {k: v for k, v in values.items() if k not in row}, allow_nan=False) + "\n")
        self._file.flush()

    def finish(self) -> None:
        self._file.close()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"
