"""Where the time of steps goes: stages, timed in the controller."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from podium.telemetry import StageFinished, emit, metrics as names

__all__ = ["StageClock"]


class StageClock:
    """Times the stages of steps, of which several may be in progress, and adds them up over the run.

    ``totals_s`` and ``totals_tokens`` are by stage, over all steps.
    """

    def __init__(self) -> None:
        self.totals_s: dict[str, float] = {}
        self.totals_tokens: dict[str, float] = {}
        self._lock = threading.Lock()
        self._began_ns: dict[int, int] = {}  # by step, of those that are not finished
        self._spent_s: dict[int, dict[str, float]] = {}
        self._finished_ns = 0

    @contextmanager
    def stage(self, name: str, step: int, half: str) -> Iterator[None]:
        """Time the block as stage ``name`` of ``step``; the times of a stage that a step enters twice add up."""
        started_ns = time.monotonic_ns()
        with self._lock:
            self._began_ns.setdefault(step, started_ns)
        try:
            yield
        finally:
            ended_ns = time.monotonic_ns()
            with self._lock:
                spent = self._spent_s.setdefault(step, {})
                spent[name] = spent.get(name, 0.0) + (ended_ns - started_ns) / 1e9
            emit(StageFinished(name, step, started_ns, ended_ns, half))

    def finish(self, step: int, tokens: Mapping[str, float]) -> dict[str, float]:
        """The times and speeds of ``step`` as metrics; ``tokens`` are by stage, and "step" is the whole.

        A step lasts from its first stage to now, or from the end of the step before where the two overlap. So the
        times of steps add up to the time that passed.
        """
        now_ns = time.monotonic_ns()
        with self._lock:
            spent = self._spent_s.pop(step, {})
            began_ns = max(self._began_ns.pop(step, now_ns), self._finished_ns)
            self._finished_ns = now_ns
            spent["step"] = (now_ns - began_ns) / 1e9
            for name, seconds in spent.items():
                self.totals_s[name] = self.totals_s.get(name, 0.0) + seconds
            for name, count in tokens.items():
                self.totals_tokens[name] = self.totals_tokens.get(name, 0.0) + count
        speeds = {name: count / max(spent[name], 1e-9) for name, count in tokens.items() if name in spent}
        return {names.TIME_PREFIX + name: seconds for name, seconds in spent.items()} | {
            names.TOKENS_PER_S_PREFIX + name: speed for name, speed in speeds.items()
        }

    def tokens_per_s(self) -> dict[str, float]:
        """Speed of each stage over the whole run."""
        return {
            name: count / self.totals_s[name] for name, count in self.totals_tokens.items() if self.totals_s.get(name)
        }
