"""A run that loses worker processes goes on, and its results are those of a run that lost none."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest

from podium.data import Batch
from podium.errors import PodiumError
from podium.rollout.engines import Engine, base
from podium.rollout.engines.journal import read_journal
from podium.rollout.sampling import SamplingParams
from podium.runs.ledger import read_ledger
from podium.runtime import Cluster, concat, endpoint, first, shard
from podium.telemetry import EvalFinished, Event, Note, PhaseStarted, Recovered, StageFinished, StepFinished, subscribe
from podium.trainer import GRPOConfig, PPOTrainer
from podium.trainer.completions import ScoredBatch
from podium.trainer.prompts import Prompt, completion_seeds
from podium.trainer.schedules.steps import Rollout, Steps
from podium.workers import Generator, Policy
from tests.integration.processes import all_gone
from tests.integration.training import MODEL, losses, tiny

SECTIONS: dict[str, Any] = {"eval": {"items": 0}, "save": {"every": 1, "model": False}}
SPLIT = {"layout": "split"}
STOP = 0  # the token that ends a completion
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
            pids.append(trainer.run.roles.workers[role].group.pids[0])
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
    assert str(completions(run)) == str(completions(undisturbed)), "as text, in which NaN is equal to NaN"
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
    assert not all_gone(pids, 60.0)


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
            assert trainer.run.roles.generators
            pids.append(trainer.run.roles.generators[0].group.pids[0])
            os.kill(pids[0], signal.SIGKILL)  # while the steps after it are drawn, and before the weights are sent

    asked = {"steps": 7, "schedule": "asynchronous", "max_staleness": 2}
    said = fit(preloaded, tiny(GRPOConfig, tmp_path, run=asked, placement=SPLIT, **SECTIONS), see)
    assert len(said) == 1
    ledger = tmp_path / "runs" / "run" / "ledger.jsonl"
    assert read_ledger(ledger).counts() == {"trained": 28}
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    drawn = [line for line in lines if line.get("state") == "rolled_out"]
    assert all(line["step"] - 1 - low <= 2 for line in drawn for low, _ in line["versions"])


class Reporting(Generator):
    """It writes to its journal after each token, and notes which completions it continues."""

    def __init__(self, *given: Any, folder: Path, **named: Any) -> None:
        super().__init__(*given, **named)
        self.folder = folder

    def _make_engine(self) -> Engine:
        base.REPORT_EVERY_S = 0.0  # type: ignore[misc] - in a process of its own
        engine = super()._make_engine()
        report, generate_later = engine._report, engine.generate_later

        def report_and_tell() -> None:
            report()
            seeds = {id: seed for id, (_, seed, _) in engine._journals.items()}
            self.reported({seeds[id]: drawn.token_ids for id, drawn in engine.drawn() if id in seeds})

        def note_and_generate(prompts: Any, params: Any, seeds: Any, journal: Any = None, begun: Any = None) -> Any:
            known = {seed: begun[seed].token_ids for seed in seeds if seed in begun} if begun else {}
            with (self.folder / "continued").open("a") as file:
                file.write(f"{json.dumps(known)}\n")
            return generate_later(prompts, params, seeds, journal, begun)

        engine._report, engine.generate_later = report_and_tell, note_and_generate
        return engine

    def reported(self, drawn: dict[int, list[int]]) -> None:
        """What the completions in flight are, by seed, and what the journal has of them."""


class Fatal(Reporting):
    """The first one that has drawn eight tokens of a completion ends. It leaves a note of what it had drawn."""

    def reported(self, drawn: dict[int, list[int]]) -> None:
        unfinished = {seed: tokens for seed, tokens in drawn.items() if tokens[-1] != STOP}
        if max(map(len, unfinished.values()), default=0) < 8:
            return
        with suppress(FileExistsError), (self.folder / "begun").open("x") as file:
            json.dump(unfinished, file)
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)


def test_another_generator_goes_on_from_the_tokens_of_one_that_is_killed(preloaded: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    config = tiny(
        GRPOConfig, tmp_path, run={"steps": 2, "schedule": "asynchronous"}, model=LONGER,
        sampling={"max_new_tokens": 24, "n": 4, "stop_token_ids": [STOP]}, engine={"max_sequences": 8},
        placement={**SPLIT, "generator_ranks": 2}, **SECTIONS,
    )  # fmt: skip
    fatal = Fatal.bind(config.model, config.engine, folder=tmp_path)
    fit(preloaded, config, lambda trainer, event: None, workers={"generator": fatal})
    assert read_ledger(run / "ledger.jsonl").counts() == {"trained": 8}
    begun = json.loads((tmp_path / "begun").read_text())
    continued = dict[str, list[int]]()
    for line in (tmp_path / "continued").read_text().splitlines():
        continued |= json.loads(line)
    trained = [row for table in completions(run) for row in table["tokens"]]
    for seed, tokens in begun.items():
        assert continued[seed] == tokens, "tokens that had been drawn were drawn again"
        assert any(row[: len(tokens)] == tokens for row in trained)
    assert not (run / ".in_flight").exists()


def test_a_generator_that_is_lost_again_and_again_ends_the_run_within_seconds(
    preloaded: Cluster, tmp_path: Path
) -> None:
    asked = {"steps": 4, "schedule": "asynchronous", "max_restarts": 1}
    config = tiny(GRPOConfig, tmp_path, run=asked, placement=SPLIT, **SECTIONS)
    with pytest.raises(PodiumError, match=r"lost workers 2 times within an hour") as caught:
        fit(preloaded, config, lambda trainer, event: None, workers={"generator": Ending})
    assert str(caught.value).count("s ago: rank 0 of generator (") == 2


class Unlucky(Reporting):
    """The first of them cannot be made a second time."""

    def __init__(self, *given: Any, folder: Path, **named: Any) -> None:
        super().__init__(*given, folder=folder, **named)
        if self.ctx.role == "generator-0":
            (folder / "made").touch(exist_ok=False)


def test_a_run_goes_on_without_a_generator_that_cannot_be_restarted(preloaded: Cluster, tmp_path: Path) -> None:
    notes: list[str] = []
    begun: set[int] = set()

    def see(trainer: PPOTrainer, event: Event) -> None:
        if isinstance(event, PhaseStarted):
            os.kill(trainer.run.roles.generators[0].group.pids[0], signal.SIGKILL)
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
            trainer.run.saver.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))

    try:
        with pytest.raises(PodiumError) as caught:
            fit(preloaded, tiny(GRPOConfig, tmp_path, run={"steps": 4}, **SECTIONS), see)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == (
        f"cannot write the files in {run}: File too large; raise the limit on the size of files (ulimit -f). "
        f"{run}/checkpoints/step-000002 is complete: then resume with --resume {run}"
    )
    resumed = tiny(GRPOConfig, tmp_path, run={"steps": 4, "resume": str(run)}, **SECTIONS)
    fit(preloaded, resumed, lambda trainer, event: None)
    same_as(run, undisturbed)


class FailsOnce(PPOTrainer):
    """Its grading of step 4 fails while step 2 is learned, and before step 2 is saved. Step 3 is collected by then."""

    collecting: ClassVar[dict[int, Future[Rollout]]] = {}
    failed = False

    def score(self, batch: Batch, prompts: Sequence[Prompt], step: int) -> ScoredBatch:
        if step == 4 and not self.failed:
            raise RuntimeError("on purpose")
        return super().score(batch, prompts, step)

    def learn(self, scored: ScoredBatch) -> Mapping[str, float]:
        if scored.step == 2 and not self.failed:
            assert not wait([self.collecting[3], self.collecting[4]], 60.0).not_done
        return super().learn(scored)


def test_a_step_that_fails_ahead_of_a_checkpoint_is_collected_again_by_the_resumed_run(
    preloaded: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, collect_ahead = tmp_path / "runs" / "run", Steps.collect_ahead

    def note(steps: Steps, step: int) -> Future[Rollout]:
        FailsOnce.collecting[step] = collecting = collect_ahead(steps, step)
        return collecting

    monkeypatch.setattr(Steps, "collect_ahead", note)
    asked = {"steps": 6, "schedule": "asynchronous", "max_staleness": 2}
    config = tiny(GRPOConfig, tmp_path, run={**asked, "resume": "auto"}, placement=SPLIT, **SECTIONS)
    with pytest.raises(RuntimeError, match="on purpose"):
        FailsOnce(config, cluster=preloaded, show=False).fit()
    counts = read_ledger(run / "ledger.jsonl").counts()
    assert counts["trained"] == 12
    assert "dropped" not in counts
    monkeypatch.setattr(FailsOnce, "failed", True)
    FailsOnce(config, cluster=preloaded, show=False).fit()
    assert read_ledger(run / "ledger.jsonl").counts() == {"trained": 24}
