"""What a step takes of the controller's time: `python -m bench.controller_time [--layout split] [--show]`.

A GRPO run of bench.suites.grpo's workload (0.85M parameters) with the controller in this process and its workers on the
backend `local`. Rows, in per cent of the wall time of a step and in ms, medians over steps:

    waits    no worker and no grading process is at work: the step waits for the controller and for messages
    main     processor time of the thread that runs the steps
    process  processor time of all threads of the controller

`--stages` also prints where the waits are, and what the thread that runs the steps computes, by stage, and `--threads`
the processor time by thread. On a busy machine the waits grow, since whoever is woken waits for a core; processor time
grows less. Most of it seems to be time in which code and data come back into the processor's caches after a wait: the
same operations take a quarter of it, or less, in a loop, and as much as here after a sweep through 48 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.measure import Row, covered
from bench.podium_grpo import LATE_EVENTS_S, config_of
from bench.workload import StepLoad
from podium.rewards import Grade
from podium.telemetry import CallFinished, Event, StageFinished, StepFinished, subscribe
from podium.trainer import GRPOConfig, PPOTrainer, Summary
from podium.trainer.prompts import Prompt
from podium.trainer.run_setup import Run

WARMUPS = 3
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Mark:
    """The clocks at the end of a step, in nanoseconds."""

    wall: int
    main: int
    process: int


class Meter:
    """Takes the times of a run's steps from its events, in the thread that emits them."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.working: Spans = []
        self.stages: list[tuple[str, int, int]] = []
        self.computed: list[tuple[str, int, int]] = []  # stages, and "end" of a step: wall clock, own processor time
        self.threads: list[Mapping[str, int]] = []  # after the warm-up, and at the end

    def take(self, event: Event) -> None:
        match event:
            case CallFinished(started_ns=started, ended_ns=ended):
                self.working.append((started, ended))
            case StageFinished(name=name, started_ns=started, ended_ns=ended):
                self.stages.append((name, started, ended))
                self._note(name)
            case StepFinished():
                self._note("end")
                self.marks.append(Mark(time.monotonic_ns(), time.thread_time_ns(), time.process_time_ns()))
                if len(self.marks) == WARMUPS:
                    self.threads.append(threads())
            case _:
                pass

    def rows(self, layout: str) -> list[Row]:
        """The shares of a step, in per cent."""
        spent: dict[str, list[tuple[float, int]]] = defaultdict(list)  # of each step, beside its wall time
        for before, after in self.steps():
            wall = after.wall - before.wall
            spent["waits"].append((wall - covered(self.working, before.wall, after.wall), wall))
            spent["main"].append((after.main - before.main, wall))
            spent["process"].append((after.process - before.process, wall))
        rows = [row("step_s", "s", [wall / 1e9 for _, wall in spent["main"]])]
        for name, figures in spent.items():
            rows.append(row(f"controller_{name}_{layout}", "%", [100 * part / wall for part, wall in figures]))
            rows.append(row(f"controller_{name}_{layout}", "ms", [part / 1e6 for part, _ in figures]))
        return rows

    def waits_ms(self) -> dict[str, list[float]]:
        """By stage, and "between" stages: milliseconds of each step in which nobody works."""
        found: dict[str, list[float]] = defaultdict(list)
        for before, after in self.steps():
            spent: dict[str, float] = defaultdict(float)
            between = after.wall - before.wall - covered(self.working, before.wall, after.wall)
            for name, started, ended in self.stages:
                if before.wall <= started < after.wall:
                    spent[name] += ended - started - covered(self.working, started, ended)
            spent["between"] = between - sum(spent.values())
            for name, ns in spent.items():
                found[name].append(ns / 1e6)
        return found

    def computed_ms(self) -> dict[str, list[float]]:
        """By stage: milliseconds of each step that the thread which runs the steps computes, since the stage before."""
        found: dict[str, list[float]] = defaultdict(list)
        for before, after in self.steps():
            spent: dict[str, float] = defaultdict(float)
            last = before.main
            for name, wall, main in self.computed:
                if before.wall < wall <= after.wall:
                    spent[name] += main - last
                    last = main
            for name, ns in spent.items():
                found[name].append(ns / 1e6)
        return found

    def _note(self, name: str) -> None:
        if threading.current_thread() is threading.main_thread():
            self.computed.append((name, time.monotonic_ns(), time.thread_time_ns()))

    def threads_ms(self) -> dict[str, float]:
        """By thread: milliseconds of processor time a step, over all steps."""
        first, last = self.threads
        steps = len(self.marks) - WARMUPS
        return {name: (ns - first.get(name, 0)) / steps / 1e6 for name, ns in last.items()}

    def steps(self) -> list[tuple[Mark, Mark]]:
        marks = self.marks[WARMUPS - 1 :]
        return list(pairwise(marks))


class Timed(PPOTrainer):
    """Adds the time in which graders work: from the items' sending to the last grade."""

    meter: Meter

    def finish(self, done: int) -> Summary:
        self.meter.threads.append(threads())
        return super().finish(done)

    def prepare(self, stack: ExitStack, lasting: ExitStack, before: Run[Prompt] | None = None) -> Run[Prompt]:
        run = super().prepare(stack, lasting, before)
        grader: Any = run.grader
        send, wait, working, sent_ns = grader._send, grader._wait, self.meter.working, 0

        def timed_send(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent_ns
            pending = send(*args, **kwargs)
            sent_ns = time.monotonic_ns()
            return pending

        def timed_wait(*args: Any) -> list[Grade]:
            grades = wait(*args)
            working.append((sent_ns, time.monotonic_ns()))
            return grades

        grader._send, grader._wait = timed_send, timed_wait
        return run


def threads() -> dict[str, int]:
    """Processor time of this process's threads, by name, in ns, to a hundredth of a second."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, int] = defaultdict(int)
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        found[names.get(int(task.name), "not Python's")] += (int(fields[11]) + int(fields[12])) * 10**9 // TICKS_PER_S
    return found


def row(name: str, unit: str, found: Sequence[float]) -> Row:
    low, median, high = statistics.quantiles(found, n=4)
    floor = "0: a controller that is idle"
    return Row(name=name, unit=unit, median=median, quartiles=(low, high), better="lower", floor=floor)


def config(folder: Path, layout: str, steps: int) -> GRPOConfig:
    whole = config_of(StepLoad(), folder)
    placement = replace(whole.placement, layout=layout)
    if layout == "split":
        placement = replace(placement, ranks=1)  # a core for the policy, another for the generator
    return replace(whole, run=replace(whole.run, steps=steps), placement=placement)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.controller_time", description=__doc__)
    parser.add_argument("--layout", choices=("colocated", "split"), default="colocated")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--show", action="store_true", help="show the run's progress, which is the controller's too")
    parser.add_argument("--stages", action="store_true", help="where nobody works, and what is computed")
    parser.add_argument("--threads", action="store_true", help="processor time by thread")
    options = parser.parse_args()
    meter = Timed.meter = Meter()
    with tempfile.TemporaryDirectory(prefix="podium-bench-") as folder:
        trainer = Timed(config(Path(folder), options.layout, WARMUPS + options.steps), show=options.show, report=False)
        unsubscribe = subscribe(meter.take)
        trainer.fit()
        time.sleep(LATE_EVENTS_S)
        unsubscribe()
    found = meter.rows(options.layout)
    if options.stages:
        found += [row(f"waits_{name}", "ms", spent) for name, spent in meter.waits_ms().items()]
        found += [row(f"main_{name}", "ms", spent) for name, spent in meter.computed_ms().items()]
    for one in found:
        sys.stdout.write(json.dumps(one.as_json()) + "\n")
    if options.threads:
        sys.stdout.write(json.dumps({name: round(ms, 2) for name, ms in meter.threads_ms().items() if ms}) + "\n")


if __name__ == "__main__":
    main()
