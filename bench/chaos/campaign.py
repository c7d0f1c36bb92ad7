"""One run under faults, and its undisturbed twin.

Moments and victims follow from a seed. What each fault led to is written at once, so that a campaign which is
interrupted goes on with the faults that are missing.
"""

from __future__ import annotations

import json
import math
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.chaos.books import check_books
from bench.chaos.faults import FAULTS, SURFACES_S
from bench.chaos.training import PROMPTS, STALENESS
from bench.chaos.victim import PATIENCE_S, Failed, Victim

__all__ = ["Campaign", "Result"]

QUIET_S = (0.1, 1.5)  # between the step after one fault and the next fault
LATE_S = 0.2  # within which a step that has ended is in the metrics
LAST_STEPS = 3  # after the last fault


class Result(NamedTuple):
    """What one fault led to.

    Attributes:
        outcome: "survived", "restarted", "surfaced", "missed" if there was nobody to harm, or "wrong".
        recovery_s: From the fault to the end of the next step that had not been finished before.
        surfaced_s: From the fault to the end of the controller, if the fault surfaced.
        text: The error, or what is wrong.
    """

    schedule: str
    fault: str
    outcome: str
    recovery_s: float
    surfaced_s: float = 0.0
    text: str = ""


class Campaign:
    """The faults of one schedule.

    Args:
        folder: Holds the two runs, and ``SCHEDULE.results.jsonl``. A campaign that was interrupted there goes on.
        victim: Makes a run of a name.
        sessions: Whether the runs are of sessions.
    """

    def __init__(
        self,
        folder: Path,
        schedule: str,
        faults: Sequence[str],
        kills: int,
        seed: int,
        victim: Callable[[str], Victim],
        sessions: bool = False,
    ) -> None:
        self.folder, self.schedule, self.sessions = folder, schedule, sessions
        self.path = folder / f"{schedule}.results.jsonl"
        self._steps = folder / f"{schedule}.steps"  # has the number of the last step, once all faults have struck
        order = random.Random(f"{seed}/{schedule}")
        plan = [fault for _ in range(kills) for fault in order.sample(list(faults), len(faults))]
        self.results = [Result(**json.loads(line)) for line in self._lines()]
        done = Counter(result.fault for result in self.results)
        self.plan = [fault for fault, nth in _numbered(plan) if nth >= done[fault]]
        self._random = random.Random(f"{seed}/{schedule}/{len(self.results)}")
        self._victim = victim
        self.steps = 0  # of the whole run, once it has ended

    def _lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def run(self, say: Callable[[Result], None] = lambda result: None, until: float = math.inf) -> list[str]:
        """Run everything, and begin no fault when the monotonic clock shows more than ``until``. Returns what is
        wrong."""
        victim = self._victim(f"{self.schedule}-disturbed")
        try:
            if self.plan:
                self._steps.unlink(missing_ok=True)  # of a campaign that struck less often
                victim.start()
            for fault in self.plan:
                if time.monotonic() > until:
                    break
                result = self._disturb(victim, fault)
                self.results.append(result)
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result._asdict()) + "\n")
                say(result)
            return [f"{result.fault}: {result.text}" for result in self.results if result.outcome == "wrong"] + (
                self._settle(victim)
            )
        finally:
            victim.end()

    def _disturb(self, victim: Victim, name: str) -> Result:
        """One fault, from the step before it to the step after it. A run that does not do what it must is started
        anew, so that the next fault finds one."""
        fault = FAULTS[name]
        struck = time.monotonic()
        try:
            victim.wait_for_step(victim.step() + 1)
            if not fault.at_once:
                time.sleep(self._random.uniform(*QUIET_S))
            victim.look()
            errors = len(victim.errors())
            struck = time.monotonic()
            try:
                fault.strike(victim)
            except ProcessLookupError as error:
                return Result(self.schedule, name, "missed", 0.0, text=str(error))
            victim.look()
            time.sleep(LATE_S)
            step = victim.step()
            outcome, text, surfaced_s = self._outcome(victim, name, step, errors, struck)
            return Result(self.schedule, name, outcome, round(time.monotonic() - struck, 2), surfaced_s, text)
        except Failed as error:
            victim.end()
            fault.heal(victim)
            victim.start()
            return Result(self.schedule, name, "wrong", round(time.monotonic() - struck, 2), text=str(error))

    def _outcome(self, victim: Victim, name: str, step: int, errors: int, struck: float) -> tuple[str, str, float]:
        """Wait until the run has gone on or ended, start it again if it has ended, and say which it was."""
        fault = FAULTS[name]
        goal = step + 2 + STALENESS[self.schedule]  # what was begun before may need nobody any more
        patience_s = {"surfaces": SURFACES_S, "restarts": 30.0}.get(fault.outcome, PATIENCE_S)
        until = time.monotonic() + patience_s
        while victim.running() and time.monotonic() < until:
            if fault.outcome in ("survives", "either") and victim.step() >= goal:
                break
            time.sleep(0.02)
        if victim.running():
            if fault.outcome in ("surfaces", "restarts"):
                raise Failed(f"the run has not ended within {patience_s:g} s: {victim.said()}")
            victim.wait_for_step(goal)
            return "survived", "", 0.0
        surfaced_s = round(time.monotonic() - struck, 2)
        said, text = victim.errors()[errors:], ""
        if fault.outcome in ("surfaces", "either"):
            text = f"{said[-1]['type']}: {said[-1]['text']}" if said else "no error"
            if len(said) != 1 or not re.search(fault.error, text):
                raise Failed(
                    f"the run ended with {len(said)} errors, expected {fault.error!r}: {text}\n{victim.said()}"
                )
        elif fault.outcome == "survives" or said:
            raise Failed(f"the run ended: {said[-1:]}\n{victim.said()}")
        if left := victim.leaves():
            raise Failed("; ".join(left))
        fault.heal(victim)
        goal = victim.step() + 1
        victim.start()
        victim.wait_for_step(goal)
        return ("restarted" if fault.outcome == "restarts" else "surfaced"), text[:1000], surfaced_s

    def _settle(self, victim: Victim) -> list[str]:
        """End the run some steps later, run its undisturbed twin for as many steps, and check the books."""
        if not self._steps.exists():
            victim.look()
            victim.end()
            self._steps.write_text(str(victim.step() + LAST_STEPS))
        self.steps = steps = int(self._steps.read_text())
        twin = self._victim(f"{self.schedule}-undisturbed")
        wrong: list[str] = []
        try:
            for run in (victim, twin):
                run.start(steps)
                if code := run.wait(PATIENCE_S + 2.0 * steps):
                    return [f"{run.name} ended with exit code {code}: {run.said()}"]
                wrong += run.leaves()
        finally:
            twin.end()
        staleness = STALENESS[self.schedule]
        about: dict[str, Any] = {"steps": steps, "prompts": PROMPTS, "staleness": staleness, "sessions": self.sessions}
        return wrong + check_books(victim.directory, twin.directory, **about)

    def summary(self) -> list[dict[str, Any]]:
        """Return a row for each kind of fault, with the number of faults and of each outcome.

        Each outcome has its median and its longest time, from the fault to the next step and to the error.
        """
        rows: list[dict[str, Any]] = []
        for name in dict.fromkeys(result.fault for result in self.results):
            own = [result for result in self.results if result.fault == name]
            outcomes: dict[str, Any] = {}
            for outcome in dict.fromkeys(result.outcome for result in own):
                some = [result for result in own if result.outcome == outcome]
                recovery, error = [one.recovery_s for one in some], [one.surfaced_s for one in some]
                outcomes[outcome] = {
                    "count": len(some),
                    "recovery_s": [round(statistics.median(recovery), 2), max(recovery)],
                    "error_s": [round(statistics.median(error), 2), max(error)],
                }
            rows.append({"fault": name, "faults": len(own), "outcomes": outcomes})
        return rows


def _numbered(plan: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Each fault, and how many of its kind come before it."""
    before = Counter[str]()
    for fault in plan:
        yield fault, before[fault]
        before[fault] += 1
