"""A GRPO step, whole and by stages, beside TRL's GRPOTrainer: same model, prompts, lengths, sampling and precision.

Each trains in a process of its own and pauses between its turns. TRL runs with its fastest settings: without gradient
checkpointing, and with the number of threads that a short trial before found faster. Podium runs with its defaults.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
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
def trl_trainer(context: Context, load: StepLoad, python: Path, threads: int) -> Iterator[Turns]:
    environment = {"OMP_NUM_THREADS": str(threads)}
    log = context.log_of(f"trl-{threads}")
    with start_peer(peer_command(python, "trl_grpo"), log, environment=environment) as peer:
        peer.call("open", load=load.as_arguments(), threads=threads, gradient_checkpointing=False)
        yield Turns(peer, load)


def faster_threads(context: Context, load: StepLoad, python: Path) -> int:
    """With how many threads TRL is faster here: on a busy machine one beats two by far."""
    speeds: dict[int, float] = {}
    for threads in (1, 2):
        with trl_trainer(context, load, python, threads) as trl:
            trl.tokens_per_s()
            speeds[threads] = trl.tokens_per_s()
    context.say(f"TRL: {', '.join(f'{speed:.0f} tokens/s with {n} threads' for n, speed in speeds.items())}")
    return max(speeds, key=lambda threads: speeds[threads])


def grpo(context: Context) -> Iterator[Row]:
    """Completion tokens a second over a whole step, while generating, and over the rest; and where the time goes."""
    load = StepLoad()
    python = context.peer_python("trl")
    with ExitStack() as stack:
        podium = stack.enter_context(podium_trainer(context, load))
        subjects = {"podium": podium.tokens_per_s}
        trl: Turns | None = None
        if python is not None:
            trl = stack.enter_context(trl_trainer(context, load, python, faster_threads(context, load, python)))
            subjects["trl"] = trl.tokens_per_s
        warmups = 2
        figures = alternate(subjects, repetitions=context.repetitions(9), warmups=warmups)
    yield compare("grpo_step_1m", figures, unit="tokens/s", better="higher")
    podium_told = podium.told[warmups:]
    trl_told = trl.told[warmups:] if trl else []
    yield from speed_rows(load, podium_told, trl_told)
    yield from stage_rows(podium_told)
    outside = [100 * told["outside_workers"] for told in podium_told]
    yield compare("controller_share_1m", {"podium": outside}, unit="%")


def speed_rows(load: StepLoad, podium: list[dict[str, Any]], trl: list[dict[str, Any]]) -> Iterator[Row]:
    """Completion tokens a second of generation alone, and of everything that is not generation."""
    generate = {"podium": [told["stage_s"]["generate"] / STEPS for told in podium]}
    step = {"podium": [statistics.mean(told["step_s"]) for told in podium]}
    if trl:
        generate["trl"] = [sum(told["generate_s"]) / STEPS for told in trl]
        step["trl"] = [statistics.mean(told["step_s"]) for told in trl]
    rest = {name: [whole - part for whole, part in zip(step[name], generate[name], strict=True)] for name in generate}
    for label, seconds in (("generate", generate), ("rest", rest)):
        speeds = {name: [load.tokens / value for value in values] for name, values in seconds.items()}
        yield compare(f"grpo_{label}_1m", speeds, unit="tokens/s", better="higher")


def stage_rows(podium: list[dict[str, Any]]) -> Iterator[Row]:
    stages: dict[str, list[float]] = defaultdict(list)
    for told in podium:
        for name, seconds in told["stage_s"].items():
            stages[name].append(seconds / STEPS)
    for name, seconds in stages.items():
        yield compare(f"grpo_stage_{name}_1m", {"podium": seconds}, unit="ms", scale=1e3)
