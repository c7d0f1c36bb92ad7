"""A GRPO step, whole and by stages, beside TRL's GRPOTrainer: same model, prompts, lengths, sampling and precision.

Each trains in a process of its own and pauses between its turns. `trl` has the fastest settings that were found: no
gradient checkpointing, and the number of threads that a short trial before finds faster; `trl_default` is TRL as it
comes. Podium runs with its defaults.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.context import Context
from bench.measure import Row, alternate, compare
from bench.peer import PeerClient, peer_command, start_peer
from bench.workload import StepLoad

STEPS = 3  # a turn


class Turns:
    """One trainer's turns: runs a few steps and keeps what it tells of each turn."""

    def __init__(self, peer: PeerClient, load: StepLoad) -> None:
        self._peer = peer
        self._load = load
        self.told: list[dict[str, Any]] = []

    def tokens_per_s(self) -> float:
        """Completion tokens a second over the whole step."""
        told = self._peer.call("steps", count=STEPS)
        self.told.append(told)
        return self._load.tokens / statistics.median(told["step_s"])


@contextmanager
def podium_trainer(context: Context, load: StepLoad) -> Iterator[Turns]:
    command = [sys.executable, "-m", "bench.podium_grpo"]
    with start_peer(command, context.log_of("podium-grpo")) as peer:
        peer.call("open", load=asdict(load))
        yield Turns(peer, load)


@contextmanager
def trl_trainer(
    context: Context, load: StepLoad, python: Path, *, threads: int | None, gradient_checkpointing: bool = False
) -> Iterator[Turns]:
    """TRL with so many threads; None leaves them to torch."""
    environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    log = context.log_of(f"trl-{threads or 'default'}")
    with start_peer(peer_command(python, "trl_grpo"), log, environment=environment) as peer:
        peer.call("open", load=load.as_arguments(), threads=threads, gradient_checkpointing=gradient_checkpointing)
        yield Turns(peer, load)


def faster_threads(context: Context, load: StepLoad, python: Path) -> int:
    """With how many threads TRL is faster here: on a busy machine one beats two by far."""
    speeds: dict[int, float] = {}
    for threads in (1, 2):
        with trl_trainer(context, load, python, threads=threads) as trl:
            trl.tokens_per_s()
            speeds[threads] = trl.tokens_per_s()
    context.say(f"TRL: {', '.join(f'{speed:.0f} tokens/s with {n} threads' for n, speed in speeds.items())}")
    return max(speeds, key=lambda threads: speeds[threads])


def grpo(context: Context) -> Iterator[Row]:
    """Completion tokens a second over a whole step, while generating, and over the rest; and where the time goes."""
    load = StepLoad()
    python = context.peer_python("trl")
    with ExitStack() as stack:
        trainers = {"podium": stack.enter_context(podium_trainer(context, load))}
        if python is not None:
            threads = faster_threads(context, load, python)
            best = trl_trainer(context, load, python, threads=threads)
            default = trl_trainer(context, load, python, threads=None, gradient_checkpointing=True)
            trainers |= {"trl": stack.enter_context(best), "trl_default": stack.enter_context(default)}
        warmups = 2
        subjects = {name: turns.tokens_per_s for name, turns in trainers.items()}
        figures = alternate(subjects, repetitions=context.repetitions(9), warmups=warmups)
    yield compare("grpo_step_1m", figures, unit="tokens/s", better="higher")
    told = {name: turns.told[warmups:] for name, turns in trainers.items()}
    yield from speed_rows(load, told)
    yield from stage_rows(told["podium"])
    outside = [100 * turn["outside_workers"] for turn in told["podium"]]
    yield compare("controller_share_1m", {"podium": outside}, unit="%")


def speed_rows(load: StepLoad, told: Mapping[str, list[dict[str, Any]]]) -> Iterator[Row]:
    """Completion tokens a second of generation alone, and of everything that is not generation."""
    generate: dict[str, list[float]] = {}
    rest: dict[str, list[float]] = {}
    for name, turns in told.items():
        spent = [turn["stage_s"]["generate"] if name == "podium" else sum(turn["generate_s"]) for turn in turns]
        tokens = STEPS * load.tokens
        generate[name] = [tokens / seconds for seconds in spent]
        rest[name] = [tokens / (sum(turn["step_s"]) - part) for turn, part in zip(turns, spent, strict=True)]
    yield compare("grpo_generate_1m", generate, unit="tokens/s", better="higher")
    yield compare("grpo_rest_1m", rest, unit="tokens/s", better="higher")


def stage_rows(podium: list[dict[str, Any]]) -> Iterator[Row]:
    stages: dict[str, list[float]] = defaultdict(list)
    for told in podium:
        for name, seconds in told["stage_s"].items():
            stages[name].append(seconds / STEPS)
    for name, seconds in stages.items():
        yield compare(f"grpo_stage_{name}_1m", {"podium": seconds}, unit="ms", scale=1e3)
