"""A GRPO step, whole and by stages, beside TRL's GRPOTrainer: same model, prompts, lengths, sampling and precision.

Each trains in a process of its own and pauses between its turns. `trl` has the fastest settings that were found: no
gradient checkpointing, and the number of threads that a short trial before finds faster; `trl_default` is TRL as it
comes. Podium runs with its defaults on two ranks of one thread each, or at 135M with one rank of two threads, if that
is faster.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.context import Context
from bench.floors import step_rate
from bench.measure import Row, alternate, compare
from bench.peer import PeerClient, peer_command, start_peer
from bench.workload import StepLoad

STEPS = 3  # a turn of a small model


class Turns:
    """One trainer's turns: runs a few steps and keeps what it tells of each turn."""

    def __init__(self, peer: PeerClient, load: StepLoad, steps: int) -> None:
        self._peer = peer
        self._load = load
        self._steps = steps
        self.told: list[dict[str, Any]] = []

    def tokens_per_s(self) -> float:
        """Completion tokens a second over the whole step."""
        told = self._peer.call("steps", count=self._steps)
        self.told.append(told)
        return self._load.tokens / statistics.median(told["step_s"])


@contextmanager
def podium_trainer(context: Context, load: StepLoad, steps: int) -> Iterator[Turns]:
    command = [sys.executable, "-m", "bench.podium_grpo"]
    with start_peer(command, context.log_of("podium-grpo")) as peer:
        peer.call("open", load=asdict(load))
        yield Turns(peer, load, steps)


@contextmanager
def trl_trainer(
    context: Context,
    load: StepLoad,
    python: Path,
    steps: int,
    *,
    threads: int | None,
    gradient_checkpointing: bool = False,
) -> Iterator[Turns]:
    """TRL with so many threads; None leaves them to torch."""
    environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    log = context.log_of(f"trl-{threads or 'default'}")
    with start_peer(peer_command(python, "trl_grpo"), log, environment=environment) as peer:
        peer.call("open", load=load.as_arguments(), threads=threads, gradient_checkpointing=gradient_checkpointing)
        yield Turns(peer, load, steps)


def faster_trl(context: Context, load: StepLoad, python: Path, steps: int, stack: ExitStack) -> Turns:
    """TRL with the number of threads that is faster here, warmed up; its process ends with ``stack``."""
    speeds: dict[int, float] = {}
    running: dict[int, tuple[Turns, ExitStack]] = {}
    for threads in (1, 2):
        process = stack.enter_context(ExitStack())
        running[threads] = process.enter_context(trl_trainer(context, load, python, steps, threads=threads)), process
        for _ in range(2):
            speeds[threads] = running[threads][0].tokens_per_s()
    context.say(f"TRL: {', '.join(f'{speed:.0f} tokens/s with {n} threads' for n, speed in speeds.items())}")
    best = max(speeds, key=lambda threads: speeds[threads])
    for threads, (_, process) in running.items():
        if threads != best:
            process.close()
    running[best][0].told.clear()
    return running[best][0]


def faster_ranks(context: Context, load: StepLoad) -> int:
    """Whether two ranks of one thread or one of two are faster here, which Podium leaves to the user."""
    speeds: dict[int, float] = {}
    for ranks in (1, 2):
        with podium_trainer(context, replace(load, ranks=ranks), 1) as podium:
            podium.tokens_per_s()
            speeds[ranks] = podium.tokens_per_s()
    context.say(f"Podium: {', '.join(f'{speed:.0f} tokens/s with {n} ranks' for n, speed in speeds.items())}")
    return max(speeds, key=lambda ranks: speeds[ranks])


def grpo(context: Context) -> Iterator[Row]:
    """The step of a small model, whose rows were always there."""
    return step_rows(context, StepLoad())


def grpo_10m(context: Context) -> Iterator[Row]:
    """The same step of a model with ten times the parameters."""
    return step_rows(context, StepLoad(shape="10m"), turns=3, steps=1)


def grpo_135m(context: Context) -> Iterator[Row]:
    """A step of a model with the sizes of SmolLM2-135M, with few and short completions: it takes long enough."""
    load = StepLoad(shape="135m", prompts=4, completions=4, new_tokens=32)
    return step_rows(context, replace(load, ranks=faster_ranks(context, load)), turns=3, steps=1)


def step_rows(context: Context, load: StepLoad, *, turns: int = 9, steps: int = STEPS) -> Iterator[Row]:
    """Completion tokens a second over a whole step, while generating, and over the rest; and where the time goes."""
    python = context.peer_python("trl")
    with ExitStack() as stack:
        trainers = {"podium": stack.enter_context(podium_trainer(context, load, steps))}
        if python is not None:
            default = trl_trainer(context, load, python, steps, threads=None, gradient_checkpointing=True)
            trainers |= {
                "trl": faster_trl(context, load, python, steps, stack),
                "trl_default": stack.enter_context(default),
            }
        warmups = 2 if load.shape == "1m" else 1
        subjects = {name: trainer.tokens_per_s for name, trainer in trainers.items()}
        subjects["products"] = partial(step_rate, load)
        repetitions = context.repetitions(turns, 3 if load.shape == "1m" else 1)
        figures = alternate(subjects, repetitions=repetitions, warmups=warmups)
    floor = "products: the step's matrix products alone, a thread for each rank"
    yield compare(f"grpo_step_{load.shape}", figures, unit="tokens/s", better="higher", floor=floor)
    told = {name: trainer.told[warmups:] for name, trainer in trainers.items()}
    yield from speed_rows(load, told)
    yield from stage_rows(load, told["podium"])
    outside = [100 * turn["outside_workers"] for turn in told["podium"]]
    yield compare(f"controller_share_{load.shape}", {"podium": outside}, unit="%", floor="0: a controller that is idle")


def speed_rows(load: StepLoad, told: Mapping[str, list[dict[str, Any]]]) -> Iterator[Row]:
    """Completion tokens a second of generation alone, and of everything that is not generation."""
    generate: dict[str, list[float]] = {}
    rest: dict[str, list[float]] = {}
    for name, turns in told.items():
        spent = [turn["stage_s"]["generate"] if name == "podium" else sum(turn["generate_s"]) for turn in turns]
        tokens = [len(turn["step_s"]) * load.tokens for turn in turns]
        generate[name] = [count / seconds for count, seconds in zip(tokens, spent, strict=True)]
        rest[name] = [
            count / (sum(turn["step_s"]) - part) for count, turn, part in zip(tokens, turns, spent, strict=True)
        ]
    floor = "products: see grpo_step, of which this is a part"
    yield compare(f"grpo_generate_{load.shape}", generate, unit="tokens/s", better="higher", floor=floor)
    yield compare(f"grpo_rest_{load.shape}", rest, unit="tokens/s", better="higher", floor=floor)


def stage_rows(load: StepLoad, podium: list[dict[str, Any]]) -> Iterator[Row]:
    stages: dict[str, list[float]] = defaultdict(list)
    for told in podium:
        for name, seconds in told["stage_s"].items():
            stages[name].append(seconds / len(told["step_s"]))
    floor = "products: see grpo_step, of which this is a part"
    for name, seconds in stages.items():
        yield compare(f"grpo_stage_{name}_{load.shape}", {"podium": seconds}, unit="ms", scale=1e3, floor=floor)
