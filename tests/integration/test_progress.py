"""What a run tells of its long stages while they run, on each backend and schedule.

Each stage stops in its middle until the test has heard how far it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import podium
from podium import Cluster
from podium.data import Batch
from podium.rollout.engines import Engine
from podium.rollout.sampling import SamplingParams
from podium.runtime import concat, endpoint, first, shard
from podium.telemetry import Event, Progressing, subscribe
from podium.telemetry.progress import sum_counts
from podium.trainer import PRELOAD, GRPOConfig
from podium.workers import Generator, Policy
from tests.integration.training import tiny, train
from tests.waits import LONG_S

HELD_OUT = 8
STAGES = {
    ("generate", "completions"), ("score", "rows graded"), ("update", "micro-batches"), ("update", "optimizer steps"),
    ("evaluate", "completions"), ("evaluate", "rows graded"),
}  # fmt: skip


def wait_for(path: Path) -> None:
    """Stop here until the test has heard enough; in a test that fails, for a minute."""
    until = time.monotonic() + LONG_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)


class SlowPolicy(Policy):
    """Stops in the second micro-batch of its first optimizer step, and in its second optimizer step."""

    folder: Path

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._steps = self._passes = 0

        def stop(module: object, inputs: object) -> None:
            if torch.is_grad_enabled():
                self._passes += 1
                if self._passes > 1:
                    wait_for(self.folder / "update micro-batches")
                if self._steps > 1:
                    wait_for(self.folder / "update optimizer steps")

        self.engine.model.register_forward_pre_hook(stop)

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=first(), readonly=True)
    def update(self, batch: Batch) -> dict[str, float]:
        self._steps += 1
        return super().update(batch)


class SlowGenerator(Generator):
    """Stops in each call when a few of its completions are drawn."""

    folder: Path

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._stage, self._events = "", 0

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat(), returns="ref")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        self._stage, self._events = "generate" if sampling.n > 1 else "evaluate", 0
        return super().generate(prompts, sampling)

    def _ready_engine(self) -> Engine:
        engine = super()._ready_engine()
        if "advance" not in vars(engine):
            vars(engine)["advance"] = partial(self._advance, engine.advance)
        return engine

    def _advance(self, advance: Callable[..., list[Any]], interrupted: Callable[[], bool]) -> list[Any]:
        if self._events:
            wait_for(self.folder / f"{self._stage} completions")
        events = advance(interrupted)
        self._events += len(events)
        return events


def grade(completion: str, row: Mapping[str, Any], *, folder: str) -> float:
    """Stop at the second row of the evaluation before the first step, and at the second row of that step."""
    with (Path(folder) / "graded").open("a") as file:
        file.write("x")
    if stage := {2: "evaluate", HELD_OUT + 2: "score"}.get((Path(folder) / "graded").stat().st_size):
        wait_for(Path(folder) / f"{stage} rows graded")
    return float(len(completion))


RAY = pytest.mark.ray
PLACES = [
    ("inline", "asynchronous"), pytest.param("ray", "sync", marks=RAY),
    *(pytest.param(*place, marks=pytest.mark.exhaustive) for place in [
        ("inline", "sync"), ("inline", "one_step_off"),
        ("local", "sync"), ("local", "one_step_off"), ("local", "asynchronous"),
    ]),
    *(pytest.param("ray", name, marks=[RAY, pytest.mark.exhaustive]) for name in ("one_step_off", "asynchronous")),
]  # fmt: skip


@pytest.fixture
def cluster(backend: str, preloaded: Cluster) -> Iterator[Cluster]:
    if backend == "local":
        yield preloaded
    else:
        with podium.connect(backend, preload=PRELOAD) as cluster:
            yield cluster


@pytest.mark.parametrize(("backend", "schedule"), PLACES)
def test_each_long_stage_tells_how_far_it_is(cluster: Cluster, schedule: str, tmp_path: Path) -> None:
    heard: dict[tuple[str, str], tuple[int, int]] = {}

    def hear(event: Event) -> None:
        if isinstance(event, Progressing):
            stages = {count.stage for count in event.counts if count.stage}
            for unit in {count.unit for count in event.counts}:
                done, total = sum_counts([count for count in event.counts if count.unit == unit])
                if 0 < done < total:
                    heard.update(dict.fromkeys([(stage, unit) for stage in stages], (done, total)))
                    for stage in stages:
                        (tmp_path / f"{stage} {unit}").touch()

    config = tiny(
        GRPOConfig, tmp_path,
        run={"steps": 1, "schedule": schedule}, algorithm={"minibatches": 2}, eval={"items": HELD_OUT},
        engine={"max_sequences": 2}, parallel={"micro_batch_tokens": 16},
        placement={} if schedule == "sync" else {"layout": "split"},
    )  # fmt: skip

    class PolicyHere(SlowPolicy):
        folder = tmp_path

    class GeneratorHere(SlowGenerator):
        folder = tmp_path

    unsubscribe = subscribe(hear)
    try:
        train(
            config, cluster, reward=partial(grade, folder=str(tmp_path)),
            workers={"policy": PolicyHere, "generator": GeneratorHere},
        )  # fmt: skip
    finally:
        unsubscribe()
    assert heard.keys() >= STAGES
    assert heard["generate", "completions"][1] == 4 * 4
    assert schedule == "asynchronous" or heard["score", "rows graded"][1] == 4 * 4  # else in parts
    assert heard["evaluate", "completions"][1] == heard["evaluate", "rows graded"][1] == HELD_OUT
    assert heard["update", "optimizer steps"] == (1, 2)
