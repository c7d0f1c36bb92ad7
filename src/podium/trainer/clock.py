"""Where a step's time goes: stages, timed in the controller."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from podium.telemetry import StageFinished, emit
from podium.telemetry import metrics as names

__all__ = ["StageClock"]


class StageClock:
    """Times the stages of one step after another, and adds them up over the run.

    ``totals_s`` and ``totals_tokens`` are by stage, over all steps.
    """

    def __init__(self) -> None:
        self.totals_s: dict[str, float] = {}
        self.totals_tokens: dict[str, float] = {}
        self._step = 0
        self._began_ns = 0
        self._spent_s: dict[str, float] = {}

    def start(self, step: int) -> None:
        """A new step begins."""
        self._step = step
        self._began_ns = time.monotonic_ns()
        self._spent_s = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body as stage ``name``; a stage entered twice in a step adds up."""
        started_ns = time.monotonic_ns()
        try:
            yield
        finally:
            ended_ns = time.monotonic_ns()
            self._spent_s[name] = self._spent_s.get(name, 0.0) + (ended_ns - started_ns) / 1e9
            emit(StageFinished(name, self._step, started_ns, ended_ns))

    def finish(self, tokens: Mapping[str, float]) -> dict[str, float]:
        """The step's times and speeds as metrics; ``tokens`` are by stage, and "step" is the whole."""
        self._spent_s["step"] = (time.monotonic_ns() - self._began_ns) / 1e9
        for name, seconds in self._spent_s.items():
            self.totals_s[name] = self.totals_s.get(name, 0.0) + seconds
        for name, count in tokens.items():
            self.totals_tokens[name] = self.totals_tokens.get(name, 0.0) + count
        speeds = {
            name: count / max(self._spent_s[name], 1e-9) for name, count in tokens.items() if name in self._spent_s
        }
        return {names.TIME_PREFIX + name: seconds for name, seconds in self._spent_s.items()} | {
            names.TOKENS_PER_S_PREFIX + name: speed for name, speed in speeds.items()
        }

    def tokens_per_s(self) -> dict[str, float]:
        """Speed of each stage over the whole run."""
        return {
            name: count / self.totals_s[name] for name, count in self.totals_tokens.items() if self.totals_s.get(name)
        }
