"""`python -m bench.async`: the schedules at the size of a cluster, with generators and trainers that only take time.

The schedules and the queue of prompts are Podium's own code; the clock is simulated. A generator has lanes, and each of
them draws a token in a fixed time. Lengths come from a log-normal distribution with a long tail, cut at the longest
allowed. An update takes a fixed time, so long that generators and trainers are equally busy in the best case.

    ideal                   nobody ever waits: the larger of all updates and of all tokens over all lanes
    sync, all colocated     each device generates, then each trains; nobody trains while another one generates
    sync, one_step_off, …   Podium's schedules, with devices of their own for generators and trainers

The staleness of a completion is that of its first token: the updates between the weights that drew it and those that it
trained.

With `--controller` Podium's runtime gives prompts to real workers, on `inline` or `ray`, whose completions take no
time. What is measured is the controller's processor time for a sample: to send a prompt, to take its completions in, to
copy them to another process, and to enter them in the ledger. On `inline` the workers' own time is taken off.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch

import podium
from bench.report import put_section
from podium.backends import inline
from podium.data import Batch, Jagged, fields
from podium.rollout.sampling import SamplingParams
from podium.runs.ledger import Ledger
from podium.runs.schedules import declaration_of
from podium.runtime import Worker, concat, endpoint, shard
from podium.trainer.checks.preflight import load_schedule
from podium.trainer.generators import Generators, parts_of
from podium.trainer.restart_limit import LostWorkers
from podium.trainer.rollout_queue import RolloutQueue

MEDIAN, SIGMA, LONGEST = 1200, 0.9, 16_000  # tokens of a completion
TOKEN_S: Final = 0.025  # a token of one lane
LANES: Final = 64  # of one generator
N: Final = 16  # completions of a prompt
PROMPTS_A_GENERATOR: Final = 16  # of one step
GENERATORS, TRAINERS = 32, 8
RESULTS: Final = Path(__file__).with_name("async.json")
PAGE: Final = Path(__file__).parent.parent / "docs" / "schedules.md"
MARK: Final = "<!-- begin: python -m bench.async --report -->"


@dataclass(eq=False)
class Part:
    """The completions of one prompt: lengths of those that no lane has begun, and the number that are not finished."""

    rollout: Rollout
    lengths: deque[int]
    unfinished: int = N
    versions: list[int] = field(default_factory=list[int])  # by completion, that of its first token


@dataclass(eq=False)
class Rollout:
    """What ``collect`` of a step gives: its prompts, and how many are not drawn."""

    step: int
    cluster: Cluster
    parts: list[Part] = field(default_factory=list[Part])
    undrawn: int = 0

    def result(self) -> Rollout:
        """Let time pass until all is drawn, as ``Future.result`` does."""
        self.cluster.run(lambda: not self.undrawn)
        return self


class Cluster:
    """Generators on a simulated clock.

    Attributes:
        version: That of the weights that the next completion begins with.
    """

    def __init__(self, generators: int, ended: Callable[[int, Part], None]) -> None:
        self.now_s, self.version, self.busy_s = 0.0, 0, 0.0
        self._ended = ended
        self._free = [LANES] * generators
        self._waiting: list[deque[Part]] = [deque() for _ in range(generators)]
        self._ends: list[tuple[float, int, int, Part]] = []  # a heap of time, number, generator, part
        self._begun = 0

    def give(self, generator: int, part: Part) -> None:
        """Let ``generator`` draw ``part`` as soon as it has lanes."""
        self._waiting[generator].append(part)
        self._fill(generator)

    def run(self, reached: Callable[[], bool], until_s: float = float("inf")) -> None:
        """Let time pass until ``reached()``, or until the time ``until_s``."""
        while not reached():
            if not self._ends or self._ends[0][0] > until_s:
                self.now_s = until_s
                return
            self.now_s, _, generator, part = heapq.heappop(self._ends)
            self._free[generator] += 1
            part.unfinished -= 1
            if not part.unfinished:
                self._ended(generator, part)
            self._fill(generator)

    def _fill(self, generator: int) -> None:
        waiting = self._waiting[generator]
        while waiting and self._free[generator]:
            part = waiting[0]
            took_s = part.lengths.popleft() * TOKEN_S
            part.versions.append(self.version)
            self._free[generator] -= 1
            self._begun += 1
            self.busy_s += took_s
            heapq.heappush(self._ends, (self.now_s + took_s, self._begun, generator, part))
            if not part.lengths:
                waiting.popleft()


class SimulatedSteps:
    """The steps that a schedule drives, with simulated halves. See ``podium.trainer.schedules.Steps``.

    Attributes:
        stale: Number of completions by staleness.
    """

    first = 1

    def __init__(self, generators: int, steps: int, max_staleness: int, update_s: float, *, side_by_side: bool) -> None:
        self.last, self.max_staleness, self._update_s = steps, max_staleness, update_s
        self.cluster = Cluster(generators, self._ended)
        self.stale = Counter[int]()
        self._generators, self._done = generators, 0
        self._queue = RolloutQueue[Part](parts_of(LANES, N)[1]) if side_by_side else None
        for generator in range(generators if self._queue is not None else 0):
            cast(RolloutQueue[Part], self._queue).admit(generator)

    def __iter__(self) -> Iterator[int]:
        while self._done < self.last:
            yield self._done + 1

    def collect(self, step: int) -> Rollout:
        return self.collect_ahead(step).result()

    def collect_ahead(self, step: int) -> Rollout:
        rollout = Rollout(step, self.cluster)
        rollout.parts = [Part(rollout, deque(row)) for row in lengths_of(step, self._generators).tolist()]
        rollout.undrawn = len(rollout.parts)
        for place, part in enumerate(rollout.parts):
            if self._queue is None:  # each generator has its share of the step
                self.cluster.give(place * self._generators // len(rollout.parts), part)
            else:
                self._queue.add(step, part)
        self._send()
        return rollout

    def first_of(self, coming: Sequence[Rollout]) -> Rollout:
        return coming[0].result()  # none fails

    def learn(self, rollout: Rollout) -> None:
        assert rollout.step == self._done + 1 and not rollout.undrawn
        self.stale.update(self._done - version for part in rollout.parts for version in part.versions)
        self.cluster.run(lambda: False, self.cluster.now_s + self._update_s)
        self._done = self.cluster.version = rollout.step

    def _ended(self, generator: int, part: Part) -> None:
        part.rollout.undrawn -= 1
        if self._queue is not None:
            self._queue.finished(generator)
            self._send()

    def _send(self) -> None:
        while self._queue is not None and (due := self._queue.next()) is not None:
            self.cluster.give(*due)


def lengths_of(step: int, generators: int) -> Any:
    """The lengths of a step's completions, int64 ``[prompts, N]``, the same for each schedule."""
    source = np.random.default_rng([step, generators])
    drawn = source.lognormal(np.log(MEDIAN), SIGMA, (PROMPTS_A_GENERATOR * generators, N))
    return np.clip(drawn, 1, LONGEST).astype(np.int64)


def update_s() -> float:
    """The time of an update in which the generators draw a step's tokens where no lane is ever free."""
    mean = float(np.mean([lengths_of(step, GENERATORS).mean() for step in range(1, 9)]))
    return PROMPTS_A_GENERATOR * N * mean * TOKEN_S / LANES


def simulate(schedule: str, generators: int, steps: int, max_staleness: int = 0) -> dict[str, Any]:
    """Run a schedule to its end. Times are in simulated seconds."""
    trained_s = update_s()
    drives = load_schedule(schedule)
    side_by_side = declaration_of(drives).side_by_side
    run = SimulatedSteps(generators, steps, max_staleness, trained_s, side_by_side=side_by_side)
    began = time.process_time()
    drives(cast(Any, run))
    spent = time.process_time() - began
    samples = run.stale.total()
    ideal_s = max(steps * trained_s, run.cluster.busy_s / (generators * LANES))
    assert samples == steps * generators * PROMPTS_A_GENERATOR * N
    name = f"{schedule}, max_staleness {max_staleness}" if side_by_side else schedule
    return {
        "schedule": name, "generators": generators, "steps": steps, "samples": samples,
        "samples_per_s": samples / run.cluster.now_s, "of_ideal": ideal_s / run.cluster.now_s,
        "lanes_busy": run.cluster.busy_s / (generators * LANES) / run.cluster.now_s,
        "staleness": {str(stale): count / samples for stale, count in sorted(run.stale.items())},
        "most_stale": max(run.stale), "simulator_us_a_sample": 1e6 * spent / samples,
    }  # fmt: skip


def colocated(steps: int) -> float:
    """Samples a second where all devices generate and then all train."""
    devices = GENERATORS + TRAINERS
    lanes, total_s = devices * LANES, 0.0
    for step in range(1, steps + 1):
        ends = [0.0] * lanes
        for length in lengths_of(step, GENERATORS).ravel().tolist():
            heapq.heapreplace(ends, ends[0] + length * TOKEN_S)
        total_s += max(ends) + update_s() * TRAINERS / devices
    return steps * GENERATORS * PROMPTS_A_GENERATOR * N / total_s


# -- the controller's own time ---------------------------------------------------------------------------------------

_workers_s = [0.0]  # on inline the workers share the controller's process: their processor time


def _timed(run: Callable[..., None]) -> Callable[..., None]:
    """Add what a worker's call takes on inline, until its reply is ready, to the workers' time."""

    def timed(process: Any, request: Any, done: Callable[[Any], None]) -> None:
        began = time.thread_time()

        def reply(outcome: Any) -> None:
            _workers_s[0] += time.thread_time() - began
            done(outcome)

        run(process, request, reply)

    return timed


class Instant(Worker):
    """Draws completions of a few tokens at once, and keeps what others drew."""

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat(), returns="ref", concurrent=True)
    def generate_beside(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        rows = len(prompts) * sampling.n
        tokens = Jagged.from_rows([torch.arange(24)] * rows)
        values = torch.zeros(len(tokens.values))
        return Batch(
            {
                fields.TOKENS: tokens, fields.LOSS_MASK: tokens.like(values > 0),
                fields.ROLLOUT_LOGPROBS: tokens.like(values), fields.VERSIONS: tokens.like(values.long()),
                fields.VERSION_RANGE: torch.zeros(rows, 2, dtype=torch.int64),
                fields.GROUP: prompts.dense(fields.GROUP).repeat_interleave(sampling.n),
                fields.FINISH_REASON: ["stop"] * rows,
            },
        )  # fmt: skip

    @endpoint(dispatch=shard(), collect=concat(), returns="ref", concurrent=True)
    def keep(self, batch: Batch) -> Batch:
        return batch


class NoWeights:
    """A weight sync with nothing to send."""

    def sync(self, version: int, generators: Sequence[Any] | None = None) -> None:
        del version, generators


def controller(backend: str, generators: int, prompts: int, machine: str) -> dict[str, Any]:
    """Send ``prompts`` to real workers, twice, and time the second pass. ``machine`` says how busy the machine is."""
    sampling = SamplingParams(max_new_tokens=LONGEST, n=N)
    whole = Batch({
        fields.PROMPT_TOKENS: Jagged.from_rows([torch.arange(64)] * prompts),
        fields.SEED: torch.arange(prompts * N).view(prompts, N), fields.GROUP: torch.arange(prompts),
    })  # fmt: skip
    options: Mapping[str, Any] = {} if backend == "inline" else {"init": {"num_cpus": generators + 1}}
    with podium.connect(backend, **options) as cluster, tempfile.TemporaryDirectory() as folder:
        handles: Any = cluster.start_replicas(Instant.bind(), generators, name="generator", distributed=False)
        keeper: Any = cluster.start(Instant.bind(), name="keeper", distributed=False)
        capacity = parts_of(LANES, N)[1]
        weights: Any = NoWeights()
        ledger = Ledger(Path(folder) / "ledger.jsonl")
        with Generators(
            list(handles), weights, LostWorkers(0), apart=True, keeper=keeper, capacity=capacity
        ) as drawing:
            for pass_number in (1, 2):
                _workers_s[0] = 0.0
                began, spent = time.monotonic(), time.process_time()
                parts = [whole.slice(place, place + 1) for place in range(prompts)]
                ledger.take(pass_number, pass_number * prompts)
                found: list[Future[Batch]] = drawing.draw(pass_number, parts, sampling)
                for place, future in enumerate(found):
                    versions = future.result().fetch(fields.GROUP, fields.VERSION_RANGE).dense(fields.VERSION_RANGE)
                    ledger.move(pass_number, "rolled_out", [place], versions=versions[:1].tolist())
                    ledger.move(pass_number, "graded", [place])
                ledger.move(pass_number, "trained")
                wall, spent = time.monotonic() - began, time.process_time() - spent
        ledger.close()
        return {
            "backend": backend, "generators": generators, "samples": prompts * N, "machine": machine,
            "controller_us_a_sample": 1e6 * (spent - _workers_s[0] * (backend == "inline")) / (prompts * N),
            "wall_us_a_sample": 1e6 * wall / (prompts * N),
        }  # fmt: skip


def section(found: Mapping[str, Any]) -> str:
    """The results as the section of docs/schedules.md."""
    runs, sync = found["schedules"], found["schedules"][0]
    intro = (
        f"{sync['samples']:,} completions in {sync['steps']} steps, {N} a prompt; {GENERATORS} generators of {LANES} "
        f"lanes, {TRAINERS} trainers; lengths with median {MEDIAN:,}, sigma {SIGMA} and at most {LONGEST:,} tokens."
    )
    together = f"{found['colocated']:.1f} | {found['colocated'] / sync['samples_per_s']:.2f}"
    lines = [
        intro,
        "",
        "| schedule | completions a second | against `sync` | of the ideal | lanes busy | staleness: mean, most |",
        "|---|---|---|---|---|---|",
        f"| sync, colocated on all {GENERATORS + TRAINERS} | {together} | | | 0, 0 |",
    ]
    for run in runs:
        mean = sum(int(stale) * share for stale, share in run["staleness"].items())
        name, _, most = run["schedule"].partition(", max_staleness ")
        lines.append(
            f"| `{name}`{f', k = {most}' if most else ''} | {run['samples_per_s']:.1f} | "
            f"{run['samples_per_s'] / sync['samples_per_s']:.2f} | {run['of_ideal']:.1%} | {run['lanes_busy']:.0%} | "
            f"{mean:.1f}, {run['most_stale']} |"
        )
    lines += ["", "`asynchronous` with k = 4 and more generators, with as many more prompts a step:", ""]
    lines += ["| generators | completions | of the ideal | most stale |", "|---|---|---|---|"]
    for run in found["larger"]:
        cells = (f"{run['generators']:,}", f"{run['samples']:,}", f"{run['of_ideal']:.1%}", str(run["most_stale"]))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "The controller's own processor time, without grading, on one core:", ""]
    lines += ["| backend | generators | microseconds a completion | machine |", "|---|---|---|---|"]
    for run in found["controller"]:
        us = f"{run['controller_us_a_sample']:.0f}"
        lines.append(f"| `{run['backend']}` | {run['generators']:,} | {us} | {run['machine']} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.async", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--samples", type=int, default=1_000_000, help="about so many in each simulation")
    parser.add_argument("--controller", nargs="+", choices=("inline", "ray"), help="measure the controller there")
    parser.add_argument("--generators", type=int, nargs="+", default=(64, 256, 1024))
    parser.add_argument("--machine", default="idle", help="how busy it is with other work, for the report")
    parser.add_argument("--report", action="store_true", help="write docs/schedules.md from the results there are")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def say(run: dict[str, Any]) -> dict[str, Any]:
        sys.stdout.write(json.dumps(run) + "\n")
        sys.stdout.flush()
        return run

    if options.report:
        PAGE.write_text(put_section(PAGE.read_text(), section(found), MARK))
        return 0
    if options.controller:
        run_timed = _timed(inline._InlineProcess._run)  # pyright: ignore[reportPrivateUsage]
        inline._InlineProcess._run = run_timed  # pyright: ignore[reportPrivateUsage]
        sizes = [(backend, count) for backend in options.controller for count in options.generators]
        runs = {(run["backend"], run["generators"], run["machine"]): run for run in found.get("controller", ())}
        for size in sizes:
            runs[*size, options.machine] = say(controller(*size, max(1024, 2 * size[1]), options.machine))
        found["controller"] = [runs[key] for key in sorted(runs)]
    else:
        a_step = PROMPTS_A_GENERATOR * N
        steps = max(40, options.samples // (GENERATORS * a_step))
        found["colocated"] = colocated(steps)
        asked = [("sync", 0), ("one_step_off", 0), *(("asynchronous", most) for most in (1, 2, 4, 8))]
        found["schedules"] = [say(simulate(name, GENERATORS, steps, most)) for name, most in asked]
        found["larger"] = [
            say(simulate("asynchronous", count, max(40, options.samples // (count * a_step)), 4))
            for count in options.generators
        ]
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
