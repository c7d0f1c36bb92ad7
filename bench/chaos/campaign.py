"""Runs under faults, and the undisturbed run that they are compared with.

Several faults strike a run, one after another, each at a step drawn at random after the recovery from the one before.
After each recovery, every role must be held by a living process, and the ledger must balance so far. When all have
struck, the run ends some steps later, and its books are checked. The next run begins anew.

What a fault draws (the step, the moment in it, the victim) follows from the seed, the schedule, its kind and how many
of its kind came before. So a fault of a run that ended wrong can be played again alone.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.chaos.books import check_books, check_ledger, check_so_far
from bench.chaos.faults import FAULTS, SURFACES_S
from bench.chaos.training import PROMPTS, STALENESS
from bench.chaos.victim import PATIENCE_S, Failed, Victim

__all__ = ["Campaign", "Result", "Strike"]

AHEAD = (1, 8)  # steps from the recovery from one fault to the step before the next one
QUIET_S = (0.0, 0.15)  # between this step and the fault
LATE_S = 0.2  # within which a step that has ended is in the metrics
LAST_STEPS = 4  # after the last fault
ALL = 0  # checkpoints are kept
TWIN_STEPS = 100  # by how many the undisturbed run gets longer, each time that a run is longer than it is


class Strike(NamedTuple):
    """A fault, and how many of its kind came before it in its schedule. As text: "policy, fork_server#3"."""

    fault: str
    nth: int

    def __str__(self) -> str:
        return f"{self.fault}#{self.nth}"

    @classmethod
    def parse(cls, text: str) -> Strike:
        """Raises ValueError if ``text`` names no kind of fault and no number."""
        fault, _, number = text.partition("#")
        if fault not in FAULTS or not number.isdecimal():
            raise ValueError(f"{text!r} is no fault and its number, such as policy#0; faults are {', '.join(FAULTS)}")
        return cls(fault, int(number))


class Result(NamedTuple):
    """What one fault led to.

    Attributes:
        outcome: "survived", "restarted", "surfaced", "missed" if there was nobody to harm, or "wrong".
        recovery_s: From the fault to the end of the next step that had not been finished before.
        surfaced_s: From the fault to the end of the controller, if the fault surfaced.
        text: The error, or what is wrong.
        nth: How many of its kind came before.
        step: The last finished step when it struck.
    """

    schedule: str
    fault: str
    outcome: str
    recovery_s: float
    surfaced_s: float = 0.0
    text: str = ""
    nth: int = 0
    step: int = 0


class Campaign:
    """The faults of one schedule.

    Args:
        folder: Holds the two runs, and ``SCHEDULE.results.jsonl`` with the faults of runs that have ended, and
            ``SCHEDULE.runs.jsonl`` with these runs. A campaign that was interrupted there goes on. Runs that ended
            wrong are kept below ``wrong``.
        kills: The number of faults of each kind that must find somebody to harm.
        victim: Makes a run of a name.
        sessions: Whether the runs are of sessions.
        faults_a_run: How many faults strike a run.
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
        faults_a_run: int = 10,
    ) -> None:
        self.folder, self.schedule, self.sessions = folder, schedule, sessions
        self._faults, self._kills, self._seed, self._a_run = list(faults), kills, f"{seed}/{schedule}", faults_a_run
        self._paths = {name: folder / f"{schedule}.{name}.jsonl" for name in ("results", "runs")}
        self.results = [Result(**row) for row in self._read("results")]
        self.runs = self._read("runs")
        self._victim = victim

    def _read(self, name: str) -> list[dict[str, Any]]:
        path = self._paths[name]
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _append(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        with self._paths[name].open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))

    def plan(self) -> list[Strike]:
        """The faults of the next run: the kinds that have struck least, in a random order. Empty at the end."""
        struck = Counter(result.fault for result in self.results)
        harmed = Counter(result.fault for result in self.results if result.outcome != "missed")
        order = random.Random(f"{self._seed}/{len(self.results)}")
        strikes = list[Strike]()
        while len(strikes) < self._a_run:
            rest = [name for name in self._faults if harmed[name] < self._kills and struck[name] < 2 * self._kills]
            if not rest:
                break
            fewest = min(harmed[name] for name in rest)
            fault = order.choice([name for name in rest if harmed[name] == fewest])
            strikes.append(Strike(fault, struck[fault]))
            struck[fault] += 1
            harmed[fault] += 1
        order.shuffle(strikes)
        return _in_turn(strikes)

    def run(
        self,
        strikes: Sequence[Strike],
        say: Callable[[Result], None] = lambda result: None,
        until: float = math.inf,
    ) -> list[str]:
        """Let ``strikes`` strike one run, and begin none when the monotonic clock shows more than ``until``. Returns
        what is wrong."""
        began = time.monotonic()
        victim = self._victim(f"{self.schedule}-disturbed")
        victim.forget()
        results = list[Result]()
        steps, wrong = 0, list[str]()
        try:
            victim.start()
            for strike in strikes:
                if results and (results[-1].outcome == "wrong" or time.monotonic() > until):
                    break
                results.append(self._disturb(victim, strike))
                say(results[-1])
            if results[-1].outcome == "wrong":
                wrong = [f"{results[-1].fault}: {results[-1].text}"]
            else:
                steps, wrong = self._settle(victim)
        except Failed as error:
            wrong = [str(error)]
        finally:
            victim.end()
        names = [str(Strike(result.fault, result.nth)) for result in results]
        if wrong:
            again = " ".join(f'"{name}"' for name in names)
            wrong.append(f"of a run with --seed {self._seed.partition('/')[0]} --replay {again}")
            self._keep(victim)
        self.results += results
        seconds = round(time.monotonic() - began, 1)
        load = round(os.getloadavg()[1], 2)
        self.runs.append({"steps": steps, "seconds": seconds, "load": load, "faults": names, "wrong": wrong})
        self._append("results", [result._asdict() for result in results])
        self._append("runs", self.runs[-1:])
        return wrong

    def _keep(self, victim: Victim) -> None:
        folder = self.folder / "wrong" / f"{self.schedule}-{len(self.runs)}"
        for directory, name in ((victim.directory, "run"), (victim.home, "home")):
            if directory.exists():
                shutil.copytree(directory, folder / name, symlinks=True, dirs_exist_ok=True)

    def _disturb(self, victim: Victim, strike: Strike) -> Result:
        """One fault, from the steps before it to the step after it."""
        fault = FAULTS[strike.fault]
        victim.random = random.Random(f"{self._seed}/{strike}")
        struck, step = time.monotonic(), 0
        outcome, text, surfaced_s = "missed", "", 0.0
        try:
            victim.wait_for_step(victim.step() + victim.random.randint(*AHEAD))
            if not fault.at_once:
                time.sleep(victim.random.uniform(*QUIET_S))
            victim.look()
            errors, step = len(victim.errors()), victim.step()
            struck = time.monotonic()
            try:
                fault.strike(victim)
            except ProcessLookupError as error:
                text = str(error)
            else:
                victim.look()
                time.sleep(LATE_S)
                outcome, text, surfaced_s = self._outcome(victim, strike.fault, victim.step(), errors, struck)
            recovery_s = 0.0 if outcome == "missed" else round(time.monotonic() - struck, 2)
            self._check_now(victim)
        except Failed as error:
            outcome, text, recovery_s = "wrong", str(error), round(time.monotonic() - struck, 2)
            victim.end()
            fault.heal(victim)
        return Result(self.schedule, strike.fault, outcome, recovery_s, surfaced_s, text, strike.nth, step)

    def _check_now(self, victim: Victim) -> None:
        """Check that each role has its process again, and the ledger so far."""
        victim.wait_for_roles()
        if wrong := check_so_far(victim.directory / "ledger.jsonl", staleness=STALENESS[self.schedule]):
            raise Failed("; ".join(wrong))

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
                victim.write_stacks()
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

    def _settle(self, victim: Victim) -> tuple[int, list[str]]:
        """End the run some steps later, and check its books. Returns its steps, and what is wrong."""
        victim.look()
        victim.end()
        steps = victim.step() + LAST_STEPS
        steps += steps % 2  # a step with a checkpoint
        victim.start(steps)
        if code := victim.wait(PATIENCE_S + 2.0 * steps):
            return steps, [f"{victim.name} ended with exit code {code}: {victim.said()}"]
        wrong = victim.leaves()
        twin = self._victim(f"{self.schedule}-undisturbed")
        wrong += self._lengthen(twin, steps)
        about: dict[str, Any] = {"steps": steps, "prompts": PROMPTS, "staleness": STALENESS[self.schedule]}
        return steps, wrong + check_books(victim.directory, twin.directory, **about, sessions=self.sessions)

    def _lengthen(self, twin: Victim, steps: int) -> list[str]:
        """Let the undisturbed run, which has kept all its checkpoints, have at least ``steps`` steps, and check its own
        ledger. Returns what is wrong."""
        if twin.step() >= steps:
            twin.end()
            return []
        steps += TWIN_STEPS
        try:
            twin.start(steps, keep=ALL)
            if code := twin.wait(PATIENCE_S + 2.0 * steps):
                return [f"{twin.name} ended with exit code {code}: {twin.said()}"]
            wrong = twin.leaves() + check_ledger(twin.directory / "ledger.jsonl", prompts=steps * PROMPTS)
            return [f"undisturbed: {text}" for text in wrong]
        finally:
            twin.end()

    def about(self) -> dict[str, Any]:
        """What the runs so far had in all, and what was wrong of them."""
        seconds = round(sum(run["seconds"] for run in self.runs), 1)
        wrong = [text for run in self.runs for text in run["wrong"]]
        prompts = sum(run["steps"] for run in self.runs) * PROMPTS
        return {
            "schedule": self.schedule,
            "runs": len(self.runs),
            "prompts": prompts,
            "seconds": seconds,
            "wrong": wrong,
        }

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


def _in_turn(strikes: Sequence[Strike]) -> list[Strike]:
    """The same order of kinds, with those of one kind by their numbers."""
    numbers = {
        strike.fault: sorted(other.nth for other in strikes if other.fault == strike.fault) for strike in strikes
    }
    return [Strike(strike.fault, numbers[strike.fault].pop(0)) for strike in strikes]
