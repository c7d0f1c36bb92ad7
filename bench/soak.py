"""`python -m bench.soak`: thousands of steps through references, with faults among them; what grows is a leak.

Each step two producers make a batch that stays with them, and two consumers get parts of it: they read it, write into
it, keep it for a while, raise, are cancelled, or a rank of either group is killed and the group restarted. Values are
checked. `--train SCHEDULE` takes the steps of a small GRPO run instead, whose grading processes are killed now and
then, as the reward never returns for a few completions.

What all processes hold is sampled between steps, and printed as JSON lines: the median of the first quarter of the
samples, that of the last, and the difference. `--report FILE...` writes soak.json beside this file, and the section of
docs/reliability.md, from what `--samples FILE` has kept.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

import podium
from bench.census import Census, take_census
from bench.report import machine, put_section
from podium import Batch, Call, Worker, concat, endpoint, shard
from podium.errors import CallCancelled, EndpointError, RefLostError, WorkerDied
from podium.telemetry import CheckpointSaved, EvalFinished, Event, StepFinished, WorkerLost, subscribe

RANKS = 2
KEPT = 8  # batches that a consumer keeps
HELD = 4  # batches that the controller holds
SAMPLES = 200
FAILURE = "a failure on purpose"
WIDTHS = (16, 256, 4096)  # float32 a row: from what travels in a message to what a store keeps
ROWS = (2, 64)
DEADLINE_S = 60.0
RESULTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"
MARK = "<!-- begin: python -m bench.soak --report -->"
TITLES = {
    "processes": "processes",
    "threads": "threads",
    "descriptors": "descriptors",
    "files": "temporary files",
    "segments": "segments of shared memory",
    "segment_bytes": "shared memory, MiB",
    "controller_rss": "memory of the controller, MiB",
    "pss": "memory, MiB",
}
GRADING_S = 0.5  # for a reward that never returns
EVERY = 20  # steps of a training from one checkpoint, and from one evaluation, to the next


class Producer(Worker):
    @endpoint(collect=concat(), returns="ref")
    def make(self, value: int, rows: int, width: int) -> Batch:
        """`rows` rows of each rank, all elements `value`."""
        return Batch({"x": torch.full((rows, width), float(value)), "row": list(range(rows))})

    @endpoint
    def noop(self) -> None:
        return None


class Consumer(Worker):
    def __init__(self) -> None:
        self._kept: deque[Batch] = deque(maxlen=KEPT)

    @endpoint(dispatch=shard())
    def mean(self, batch: Batch) -> float:
        return float(batch.dense("x").mean())

    @endpoint(dispatch=shard())
    def spoil(self, batch: Batch) -> None:
        batch.dense("x").zero_()

    @endpoint(dispatch=shard())
    def fail(self, batch: Batch) -> None:
        raise RuntimeError(f"{FAILURE}, with {len(batch)} rows")

    @endpoint(dispatch=shard())
    async def linger(self, batch: Batch) -> None:
        del batch
        await asyncio.sleep(DEADLINE_S)

    @endpoint(receives="ref")
    def keep(self, batch: Batch) -> None:
        self._kept.append(batch)

    @endpoint
    def read_kept(self) -> float:
        """The first element of what was kept longest; 0 if it was lost with its producer, or nothing was kept."""
        if not self._kept:
            return 0.0
        try:
            return float(self._kept[0].fetch("x").dense("x")[0, 0])
        except RefLostError:
            return 0.0

    @endpoint
    def noop(self) -> None:
        return None


class Soak:
    """The groups, and what is done with them. `counts` says what happened how often."""

    def __init__(self, cluster: podium.Cluster, chance: random.Random) -> None:
        pools = cluster.pool([2 * RANKS]).split([RANKS, RANKS])
        # Without a process group: what one rank finds lost, another may still wait for, and that would break it.
        self._producers = cluster.start(Producer.bind(), pools[0], timeout_s=DEADLINE_S, distributed=False)
        self._consumers = cluster.start(Consumer.bind(), pools[1], timeout_s=DEADLINE_S, distributed=False)
        self._chance = chance
        self._held: deque[tuple[int, Batch]] = deque(maxlen=HELD)
        self._victims = itertools.cycle(("producer", "consumer"))
        self.counts: Counter[str] = Counter()
        self._actions: dict[Callable[[int, Batch], None], int] = {
            self._mean: 40,
            self._spoil: 10,
            self._keep: 15,
            self._fetch: 10,
            self._held_too: 10,
            self._fail: 10,
            self._cancel: 5,
        }

    def step(self, value: int, *, kill: bool) -> None:
        if kill:
            self._kill(value)
        batch = self._part(self._make(value))
        (action,) = self._chance.choices(list(self._actions), list(self._actions.values()))
        self.counts[action.__name__.removeprefix("_")] += 1
        action(value, batch)

    def settle(self) -> None:
        """Wait until every worker has gone through what was sent."""
        self._producers.noop()
        self._consumers.noop()
        gc.collect()

    def _make(self, value: int) -> Batch:
        return self._producers.make(value, self._chance.randint(*ROWS), self._chance.choice(WIDTHS))

    def _part(self, batch: Batch) -> Batch:
        """Some of its rows, by any of the operations on references."""
        kind = self._chance.choice(("all", "slice", "take", "concat"))
        if kind == "slice":
            return batch.slice(1, len(batch))
        if kind == "take":
            return batch.take([self._chance.randrange(len(batch)) for _ in range(len(batch))])
        return Batch.concat([batch.slice(2, len(batch)), batch.slice(0, 2)]) if kind == "concat" else batch

    # -- actions ---------------------------------------------------------------------------------------------------

    def _mean(self, value: int, batch: Batch) -> None:
        expect(self._consumers.mean(batch), value)

    def _spoil(self, value: int, batch: Batch) -> None:
        self._consumers.spoil(batch)
        expect(self._consumers.mean(batch), value)

    def _keep(self, value: int, batch: Batch) -> None:
        self._consumers.keep(batch)
        for kept in self._consumers.read_kept():
            if kept > value:
                raise AssertionError(f"a batch kept before step {value} holds {kept}")

    def _fetch(self, value: int, batch: Batch) -> None:
        expect([float(batch.fetch().dense("x").mean())], value)

    def _held_too(self, value: int, batch: Batch) -> None:
        """What the controller held for a while."""
        self._held.append((value, batch))
        older, held = self._held[0]
        try:
            expect(self._consumers.mean(held), older)
        except (RefLostError, EndpointError) as error:
            if not lost(error):
                raise
            self.counts["lost"] += 1
            self._held.popleft()

    def _fail(self, value: int, batch: Batch) -> None:
        del value
        try:
            self._consumers.fail(batch)
        except EndpointError as error:
            if FAILURE not in str(error):
                raise
        else:
            raise AssertionError("all ranks raised, and the call returned")

    def _cancel(self, value: int, batch: Batch) -> None:
        del value
        call = self._consumers.linger.submit(batch)
        time.sleep(self._chance.uniform(0.0, 0.01))
        call.cancel()
        try:
            call.result()
        except CallCancelled:
            return
        raise AssertionError("a call was cancelled, and it returned")

    def _kill(self, value: int) -> None:
        """A rank in the middle of a call, and a restart: of the producers and of the consumers, by turns."""
        kind = next(self._victims)
        self.counts[f"killed_{kind}"] += 1
        call: Call[Any]
        if kind == "producer":
            group, call = self._producers.group, self._producers.make.submit(value, *ROWS)
        else:
            group = self._consumers.group
            call = self._consumers.linger.submit(self._make(value))
        os.kill(self._chance.choice(group.pids), signal.SIGKILL)
        try:
            call.result()
            self._producers.noop()  # the producers may have been quicker than the signal
        except WorkerDied:
            pass
        group.restart()


def lost(error: Exception) -> bool:
    """The bytes went with their owner, as may happen after a kill."""
    return isinstance(error, RefLostError) or isinstance(error.__cause__, RefLostError)


def expect(means: Sequence[float], value: int) -> None:
    if any(mean != value for mean in means):
        raise AssertionError(f"all elements were {value}; their means are {means}")


def soak(
    cluster: podium.Cluster, steps: int, kills: int, seed: int, note: Callable[[int, Census], None] | None = None
) -> tuple[list[Census], Counter[str]]:
    """The samples, in order, and what happened how often. `note` gets each sample as it is taken, with its step."""
    chance = random.Random(seed)
    run = Soak(cluster, chance)
    samples: list[Census] = []
    every = max(1, steps // SAMPLES)
    deadly = set(chance.sample(range(1, steps + 1), kills))
    for step in range(1, steps + 1):
        run.step(step, kill=step in deadly)
        if step % every == 0:
            run.settle()
            samples.append(take_census(os.getpid()))
            if note is not None:
                note(step, samples[-1])
    return samples, run.counts


def train(
    folder: Path, schedule: str, backend: str, steps: int, note: Callable[[int, Census], None] | None = None
) -> tuple[list[Census], Counter[str]]:
    """The samples of a run in `folder`, in order, and how often it trained, saved and evaluated."""
    # The processes of the other soak import this module, too, and need nothing of a training.
    from bench.chaos.training import configuration
    from podium.trainer import GRPOConfig, PPOTrainer, build_config

    config = configuration(folder, "soak", schedule, steps)
    config["reward"]["time_limit_s"] = GRADING_S
    config["save"]["every"] = config["eval"]["every"] = EVERY
    config["eval"]["items"] = 8
    samples: list[Census] = []
    counts: Counter[str] = Counter()
    every = max(1, steps // SAMPLES)

    def count(event: Event) -> None:
        counts[type(event).__name__] += isinstance(event, StepFinished | CheckpointSaved | EvalFinished | WorkerLost)
        if isinstance(event, StepFinished) and event.step % every == 0:
            samples.append(take_census(os.getpid()))
            if note is not None:
                note(event.step, samples[-1])

    unsubscribe = subscribe(count)
    try:
        PPOTrainer(build_config(GRPOConfig, config), cluster=backend, show=False, report=False).fit()
    finally:
        unsubscribe()
    return samples, +counts


def report(samples: Sequence[Census]) -> list[dict[str, object]]:
    """One line a figure: medians of the first and last quarter of the samples, without the first tenth of them, in
    which caches fill."""
    samples = samples[len(samples) // 10 :]
    quarter = max(1, len(samples) // 4)
    lines: list[dict[str, object]] = []
    for name in asdict(samples[0]):
        values = [getattr(sample, name) for sample in samples]
        first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
        lines.append({"figure": name, "first_quarter": first, "last_quarter": last, "growth": last - first})
    return lines


def section(soaks: Sequence[Mapping[str, Any]]) -> str:
    """The section of the page: a column for each soak."""
    titles = [f"training, `{soak['schedule']}`" if soak["schedule"] else "references" for soak in soaks]
    lines = ["| held by all processes | " + " | ".join(titles) + " |", "|---|" + "---|" * len(soaks)]
    lines.append("| steps | " + " | ".join(f"{soak['steps']:,}" for soak in soaks) + " |")
    for name, title in TITLES.items():
        cells: list[str] = []
        for soak in soaks:
            (line,) = (line for line in soak["figures"] if line["figure"] == name)
            scale = 1 << 20 if title.endswith("MiB") else 1
            cells.append(f"{line['first_quarter'] / scale:,.0f} → {line['last_quarter'] / scale:,.0f}")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    about = soaks[0]["machine"]
    loads = " and ".join(f"{soak['machine']['load_before']:.0f}" for soak in soaks)
    where = f"{about['cores']} cores ({about['processor']}), {about['when'][:10]}, with a load of {loads} before"
    return "\n".join([f"Measured on {where}, torch {about['libraries']['torch']}.", "", *lines])


def write_report(paths: Sequence[Path]) -> None:
    """Write the figures of the soaks whose samples are in `paths`, if there are any, and the page from the figures."""
    soaks: list[dict[str, Any]] = []
    names = {field.name for field in fields(Census)}
    for path in paths:
        *lines, last = map(json.loads, path.read_text().splitlines())
        samples = [Census(**{name: line[name] for name in names}) for line in lines]
        soaks.append({**last, "figures": report(samples)})
    if soaks:
        RESULTS.write_text("[\n" + ",\n".join(f" {json.dumps(soak)}" for soak in soaks) + "\n]\n")
    PAGE.write_text(put_section(PAGE.read_text(), section(json.loads(RESULTS.read_text())), MARK))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20, help="how many ranks are killed")
    parser.add_argument("--train", default="", metavar="SCHEDULE", help="train in this schedule")
    parser.add_argument("--backend", default="local")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=Path, metavar="FILE", help="append each sample to this file as it is taken")
    parser.add_argument(
        "--report", nargs="*", type=Path, metavar="FILE",
        help="run nothing: write docs/reliability.md from the samples of soaks in these files, or from the last ones",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.report is not None:
        write_report(options.report)
        return 0
    torch.set_num_threads(1)
    started, load = time.monotonic(), os.getloadavg()[0]

    def write_line(line: Mapping[str, object]) -> None:
        if options.samples is not None:
            with options.samples.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def note(step: int, sample: Census) -> None:
        write_line({"step": step, "seconds": round(time.monotonic() - started, 1)} | asdict(sample))

    with tempfile.TemporaryDirectory(prefix="podium-soak-") as folder, temporary_directory():
        if options.train:
            samples, counts = train(Path(folder), options.train, options.backend, options.steps, note)
        else:
            with podium.connect(options.backend, hints={"echo": False}) as cluster:
                samples, counts = soak(cluster, options.steps, options.kills, options.seed, note)
    lines = report(samples)
    lines.append({"steps": options.steps, "seconds": round(time.monotonic() - started, 1), "happened": dict(counts)})
    lines[-1] |= {"backend": options.backend, "schedule": options.train, "machine": machine(load)}
    write_line(lines[-1])
    for line in lines:
        sys.stdout.write(json.dumps(line) + "\n")
    return 0


@contextmanager
def temporary_directory() -> Iterator[None]:
    """Have all temporary files of this process, and of those that it starts, in a directory of their own."""
    with tempfile.TemporaryDirectory(prefix="podium-soak-") as folder:
        before, tempfile.tempdir = os.environ.get("TMPDIR"), folder
        os.environ["TMPDIR"] = folder
        try:
            yield
        finally:
            tempfile.tempdir = before
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before


if __name__ == "__main__":
    sys.exit(main())
