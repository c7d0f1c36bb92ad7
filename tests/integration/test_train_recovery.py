"""A run that loses worker processes goes on, and its results are those of a run that lost none."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from podium.data import Batch
from podium.errors import PodiumError
from podium.rollout.engines import Engine
from podium.rollout.engines.journal import read_journal
from podium.rollout.sampling import SamplingParams
from podium.runtime import Cluster, concat, endpoint, first, shard
from podium.telemetry import EvalFinished, Event, Note, PhaseStarted, Recovered, StageFinished, StepFinished, subscribe
from podium.trainer import GRPOConfig, PPOTrainer
from podium.trainer.completions import ScoredBatch
from podium.trainer.prompts import Prompt, completion_seeds
from podium.trainer.runs.ledger import read_ledger
from podium.workers import Generator, Policy
from tests.integration.processes import all_gone
from tests.integration.training import MODEL, losses, tiny

SECTIONS: dict[str, Any] = {"eval": {"items": 0}, "save": {"every": 1, "model": False}}
SPLIT = {"layout": "split"}
LONGER: Any = {**MODEL, "config": {**MODEL["config"], "max_position_embeddings": 64}}  # pyright: ignore[reportGeneralTypeIssues]


def fit(
    cluster: Cluster | str, config: GRPOConfig, on_event: Callable[[PPOTrainer, Event], None], **given: Any
) -> list[str]:
    """Train; returns what was said of recoveries. ``on_event`` sees the trainer at each event."""
    trainer, said = PPOTrainer(config, cluster=cluster, show=False, **given), list[str]()

    def see(event: Event) -> None:
        if isinstance(event, Recovered):
            said.append(event.text)
        on_event(trainer, event)

    unsubscribe = subscribe(see)
    try:
        trainer.fit()
    finally:
        unsubscribe()
    return said


def killing(role: str, step: int, pids: list[int]) -> Callable[[PPOTrainer, Event], None]:
    """Kill the first process of ``role`` once, after ``step``."""

    def see(trainer: PPOTrainer, event: Event) -> None:
        if isinstance(event, StepFinished) and event.step == step and not pids:
            pids.append(trainer.roles.workers[role].group.pids[0])
            os.kill(pids[0], signal.SIGKILL)

    return see


def completions(run: Path) -> list[Any]:
    return [pq.read_table(file).to_pydict() for file in sorted((run / "completions").iterdir())]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    PPOTrainer(tiny(GRPOConfig, folder, run={"steps": 4}, **SECTIONS), cluster="inline", show=False).fit()
    return folder / "runs" / "run"


def same_as(run: Path, undisturbed: Path) -> None:
    assert losses(run) == losses(undisturbed)
    assert completions(run) == completions(undisturbed)
    assert read_ledger(run / "ledger.jsonl").counts() == {"trained": 16}


def test_a_generator_that_is_killed_draws_again_with_the_current_weights(
    preloaded: Cluster, tmp_path: Path, undisturbed: Path
) -> None:
    pids: list[int] = []
    config = tiny(GRPOConfig, tmp_path, run={"steps": 4}, placement=SPLIT, **SECTIONS)
    (said,) = fit(preloaded, config, killing("generator", 2, pids))
    assert (
        "signal SIGKILL) (loss 1 of at most 3 within an hour); it was restarted and has the weights of version 2"
        in said
    )
    same_as(tmp_path / "runs" / "run", undisturbed)
    assert not all_gone(pids, 10.0)


def test_a_run_that_loses_its_policy_goes_on_from_the_latest_checkpoint(tmp_path: Path, undisturbed: Path) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"steps": 4}, **SECTIONS)
    (said,) = fit("local", config, killing("policy", 3, []))
    assert said.startswith("lost rank 0 of ")
    assert "policy" in said
    same_as(tmp_path / "runs" / "run", undisturbed)
    assert [file.name for file in (tmp_path / "runs" / "run").glob("config*.yaml")] == ["config.yaml"]


def test_with_the_asynchronous_schedule_no_prompt_is_lost_with_a_generator(preloaded: Cluster, tmp_path: Path) -> None:
    pids: list[int] = []

    def see(trainer: PPOTrainer, event: Event) -> None:
        if isinstance(event, StageFinished) and (event.name, event.step) == ("advantages", 3) and not pids:
            assert trainer.roles.generators
            pids.append(trainer.roles.generators[0].group.pids[0])
            os.kill(pids[0], signal.SIGKILL)  # while the steps after it are drawn, and before the weights are sent

    asked = {"steps": 7, "schedule": "asynchronous", "max_staleness": 2}
    said = fit(preloaded, tiny(GRPOConfig, tmp_path, run=asked, placement=SPLIT, **SECTIONS), see)
    assert len(said) == 1
    ledger = tmp_path / "runs" / "run" / "ledger.jsonl"
    assert read_ledger(ledger).counts() == {"trained": 28}
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    drawn = [line for line in lines if line.get("state") == "rolled_out"]
    assert all(line["step"] - 1 - low <= 2 for line in drawn for low, _ in line["versions"])


class Slow(Generator):
    """It takes a tenth of a second for a token, so that it can be killed in the middle of a completion."""

    def _make_engine(self) -> Engine:
        engine = super()._make_engine()
        advance = engine.advance

        def slowly(interrupted: Callable[[], bool]) -> list[Any]:
            return advance(lambda: time.sleep(0.1) is None and interrupted())

        engine.advance = slowly
        return engine


def test_another_generator_goes_on_from_the_tokens_of_one_that_is_killed(preloaded: Cluster, tmp_path: Path) -> None:
    begun: dict[int, list[int]] = {}
    run = tmp_path / "runs" / "run"

    def kill_in_flight(trainer: PPOTrainer) -> None:
        until = time.monotonic() + 30
        for generator in itertools.cycle((0, 1)):
            told = read_journal(run / ".in_flight" / f"generator-{generator}.0.jsonl")
            begun.update(
                {seed: one.token_ids for seed, one in told.items() if 4 <= len(one) < 24 and one.token_ids[-1]}
            )
            if begun or time.monotonic() > until:
                os.kill(trainer.roles.generators[generator].group.pids[0], signal.SIGKILL)
                return
            time.sleep(0.02)

    def see(trainer: PPOTrainer, event: Event) -> None:
        if isinstance(event, PhaseStarted):
            threading.Thread(target=kill_in_flight, args=(trainer,)).start()

    config = tiny(
        GRPOConfig, tmp_path, run={"steps": 2, "schedule": "asynchronous"}, model=LONGER,
        sampling={"max_new_tokens": 24, "n": 4, "stop_token_ids": [0]}, engine={"max_sequences": 8},
        placement={**SPLIT, "generator_ranks": 2}, **SECTIONS,
    )  # fmt: skip
    (said,) = fit(preloaded, config, see, workers={"generator": Slow})
    assert "lost rank 0 of generator-" in said
    assert begun
    assert read_ledger(run / "ledger.jsonl").counts() == {"trained": 8}
    trained = [row for table in completions(run) for row in table["tokens"]]
    for tokens in begun.values():
        assert any(row[: len(tokens)] == tokens for row in trained), "tokens that had been drawn were drawn again"
    assert not (run / ".in_flight").exists()


def test_a_generator_that_is_lost_again_and_again_ends_the_run_within_seconds(
    preloaded: Cluster, tmp_path: Path
) -> None:
    asked = {"steps": 4, "schedule": "asynchronous", "max_restarts": 1}
    config = tiny(GRPOConfig, tmp_path, run=asked, placement=SPLIT, **SECTIONS)
    with pytest.raises(PodiumError, match=r"lost workers 2 times within an hour") as caught:
        fit(preloaded, config, lambda trainer, event: None, workers={"generator": Ending})
    assert str(caught.value).count("s ago: rank 0 of generator (") == 2


class Unlucky(Slow):
    """The first of them cannot be made a second time."""

    def __init__(self, *given: Any, folder: Path, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.ctx.role == "generator-0":
            (folder / "made").touch(exist_ok=False)


def test_a_run_goes_on_without_a_generator_that_cannot_be_restarted(preloaded: Cluster, tmp_path: Path) -> None:
    notes: list[str] = []
    begun: set[int] = set()

    def see(trainer: PPOTrainer, event: Event) -> None:
        if isinstance(event, PhaseStarted):
            os.kill(trainer.roles.generators[0].group.pids[0], signal.SIGKILL)
        if isinstance(event, Note):
            notes.append(event.text)
        if isinstance(event, EvalFinished):
            for journal in (tmp_path / "runs" / "run" / ".in_flight").iterdir():
                begun.update(read_journal(journal))

    config = tiny(
        GRPOConfig, tmp_path, run={"steps": 2, "schedule": "asynchronous"},
        placement={**SPLIT, "generator_ranks": 2}, **{**SECTIONS, "eval": {"items": 4, "every": 1, "at_start": False}},
    )  # fmt: skip
    unlucky = Unlucky.bind(config.model, config.engine, folder=tmp_path)
    assert fit(preloaded, config, see, workers={"generator": unlucky}) == []
    assert read_ledger(tmp_path / "runs" / "run" / "ledger.jsonl").counts() == {"trained": 8}
    assert any("generator-0" in note and "goes on with 1 of 2" in note for note in notes)
    assert begun, "completions that train are in the journals"
    held_out = {*completion_seeds(config.run.seed, None, 4, 1).flatten().tolist()}
    assert not begun & held_out, "evaluations have the same seeds each time, and other weights"


class Odd(Generator):
    """Some of its batches have a column that the others lack."""

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat(), returns="ref")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        batch = super().generate(prompts, sampling)
        return batch.with_columns(extra=batch.dense("group")) if int(batch.dense("group")[0]) else batch


def test_what_goes_wrong_while_parts_are_taken_in_ends_the_run(preloaded: Cluster, tmp_path: Path) -> None:
    config = tiny(
        GRPOConfig, tmp_path, run={"steps": 2, "schedule": "asynchronous"}, engine={"max_sequences": 4},
        placement=SPLIT, **SECTIONS,
    )  # fmt: skip
    with pytest.raises(PodiumError, match="extra"):
        fit(preloaded, config, lambda trainer, event: None, workers={"generator": Odd})


class Ending(Generator):
    """It ends when it is asked for completions."""

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat(), returns="ref", concurrent=True)
    async def generate_beside(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        del prompts, sampling
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Suicidal(Policy):
    """It ends in its second step, whenever it gets there."""

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=first(), readonly=True)
    def update(self, batch: Batch) -> dict[str, float]:
        if self.progress()[0] >= 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().update(batch)


def test_a_run_that_loses_workers_again_and_again_ends_with_the_causes(preloaded: Cluster, tmp_path: Path) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"steps": 3, "max_restarts": 1}, **SECTIONS)
    with pytest.raises(
        PodiumError, match=r"lost workers 2 times within an hour, and run\.max_restarts = 1:\n"
    ) as caught:
        fit(preloaded, config, lambda trainer, event: None, workers={"policy": Suicidal})
    assert str(caught.value).count("signal SIGKILL)") == 2


def test_a_disk_that_takes_no_more_of_the_ledger_is_named_with_a_remedy(
    preloaded: Cluster, tmp_path: Path, undisturbed: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = tmp_path / "runs" / "run"

    def see(trainer: PPOTrainer, event: Event) -> None:
        if isinstance(event, StageFinished) and (event.name, event.step) == ("generate", 3):
            trainer.saver.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))

    try:
        with pytest.raises(PodiumError) as caught:
            fit(preloaded, tiny(GRPOConfig, tmp_path, run={"steps": 4}, **SECTIONS), see)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == (
        f"cannot write the files in {run}: File too large; raise the limit on the size of files (ulimit -f). "
        f"{run}/checkpoints/step-000002 is whole: then resume with --resume {run}"
    )
    resumed = tiny(GRPOConfig, tmp_path, run={"steps": 4, "resume": str(run)}, **SECTIONS)
    fit(preloaded, resumed, lambda trainer, event: None)
    same_as(run, undisturbed)


class FailsOnce(PPOTrainer):
    """Its grading of step 4 fails while step 2 is learned, and before step 2 is saved."""

    failed = threading.Event()

    def score(self, batch: Batch, prompts: Sequence[Prompt], step: int) -> ScoredBatch:
        if step == 4 and not self.failed.is_set():
            self.failed.set()
            raise RuntimeError("on purpose")
        return super().score(batch, prompts, step)

    def learn(self, scored: ScoredBatch) -> Mapping[str, float]:
        if scored.step == 2:
            assert self.failed.wait(60.0)
            time.sleep(0.2)
        return super().learn(scored)


def test_a_step_that_fails_ahead_of_a_checkpoint_is_collected_again_by_the_resumed_run(
    preloaded: Cluster, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "run"
    asked = {"steps": 6, "schedule": "asynchronous", "max_staleness": 2}
    config = tiny(GRPOConfig, tmp_path, run={**asked, "resume": "auto"}, placement=SPLIT, **SECTIONS)
    with pytest.raises(RuntimeError, match="on purpose"):
        FailsOnce(config, cluster=preloaded, show=False).fit()
    counts = read_ledger(run / "ledger.jsonl").counts()
    assert counts["trained"] == 12
    assert "dropped" not in counts
    FailsOnce(config, cluster=preloaded, show=False).fit()
    assert read_ledger(run / "ledger.jsonl").counts() == {"trained": 24}
