"""What the controller itself computes in a step: metrics, seeds, order of rows, times, records, checkpoints' state."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import podium
from podium.data import Batch, Jagged, fields
from podium.errors import CheckpointError
from podium.rewards import Grade
from podium.runtime import Worker, endpoint, first
from podium.telemetry import Sample, StageFinished, metrics, subscribe
from podium.trainer import completions
from podium.trainer.clock import StageClock
from podium.trainer.completions import CompletionsLog, Judged
from podium.trainer.metrics import join_updates, rollout_metrics
from podium.trainer.run_dir import Checkpoint, CompletionsWriter
from podium.trainer.seeds import completion_seeds, row_order
from podium.trainer.state import Evaluation, TrainerState, load_checkpoint
from podium.workers import char_tokenizer


def rollouts() -> Batch:
    """Two prompts, two completions each, of 1, 2, 2 and 3 tokens after prompts of 1 and 2."""
    tokens = Jagged.from_rows([torch.tensor(row) for row in ([5, 6], [5, 7, 8], [1, 2, 3, 4], [1, 2, 9, 9, 9])])
    prompts = [1, 1, 2, 2]
    mask = [torch.arange(n) >= p for n, p in zip(tokens.lengths.tolist(), prompts, strict=True)]
    return Batch(
        {
            fields.TOKENS: tokens,
            fields.LOSS_MASK: Jagged.from_rows(mask),
            fields.VERSIONS: tokens.like(torch.full((14,), 7)),
            fields.GROUP: torch.tensor([0, 0, 1, 1]),
            fields.REWARDS: torch.tensor([1.0, 0.0, 0.5, 0.5]),
            fields.FINISH_REASON: ["stop", "length", "stop", "stop"],
        }
    )


def test_metrics_of_rollouts() -> None:
    found = rollout_metrics(rollouts(), torch.tensor([True, False, False, False]))
    assert found == {
        metrics.REWARD_MEAN: 0.5,
        metrics.REWARD_STD: pytest.approx(math.sqrt(0.125)),
        metrics.ACCURACY: 0.25,
        metrics.FLAT_GROUPS: 0.5,
        metrics.TRUNCATED: 0.25,
        metrics.TOKENS: 14.0,
    }


def test_updates_are_averaged_and_the_largest_ratio_kept() -> None:
    joined = join_updates(
        [{metrics.LOSS: 1.0, metrics.RATIO_MAX: 3.0}, {metrics.LOSS: 2.0, metrics.RATIO_MAX: 2.0}, {"v": 1}]
    )
    assert joined == {metrics.LOSS: 1.5, metrics.RATIO_MAX: 3.0, "v": 1.0}


def test_seeds_depend_on_seed_and_step_alone() -> None:
    seeds = completion_seeds(3, 5, 4, 2)
    assert seeds.shape == (4, 2)
    assert len(set(seeds.flatten().tolist())) == 8
    assert torch.equal(seeds, completion_seeds(3, 5, 4, 2))
    others = [completion_seeds(3, 6, 4, 2), completion_seeds(4, 5, 4, 2), completion_seeds(3, None, 4, 2)]
    assert all(not (seeds == other).any() for other in others)
    assert torch.equal(completion_seeds(3, None, 9, 1)[:4], completion_seeds(3, None, 4, 1))  # as many as are asked for


def test_each_epoch_goes_through_all_rows_in_an_order_of_its_own() -> None:
    first, second = row_order(0, 1, 0, 50), row_order(0, 1, 1, 50)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(50))
    assert not torch.equal(first, second)
    assert torch.equal(first, row_order(0, 1, 0, 50))


def test_the_clock_adds_stages_up_and_tells_their_speed() -> None:
    clock = StageClock()
    events: list[object] = []
    unsubscribe = subscribe(events.append)
    try:
        for step in (1, 2):
            clock.start(step)
            for _ in range(2):
                with clock.stage("update"):
                    pass
            found = clock.finish({"update": 100.0, "step": 100.0, "absent": 5.0})
    finally:
        unsubscribe()
    assert [(e.name, e.step) for e in events if isinstance(e, StageFinished)] == [("update", 1)] * 2 + [
        ("update", 2)
    ] * 2
    assert found["tokens_per_s/update"] == pytest.approx(100 / found["time/update"])
    assert found["time/step"] >= found["time/update"]
    assert "tokens_per_s/absent" not in found
    assert clock.totals_tokens["update"] == 200
    assert clock.tokens_per_s()["update"] == pytest.approx(200 / clock.totals_s["update"])


def judged(grades: list[Grade] | None, batch: Batch | None = None) -> Judged:
    batch = rollouts() if batch is None else batch
    return Judged(batch, ["p", "p", "q", "q"], ["x", "x", None, None], char_tokenizer("abcdef"), grades)


def elsewhere(batch: Batch) -> Batch:
    """As a generator's answer reaches the controller."""
    with podium.connect("inline") as cluster:
        keeper = cluster.start(Keeper.bind(), cluster.pool([1]))
        return keeper.keep(batch)


class Keeper(Worker):
    @endpoint(collect=first(), returns="ref")
    def keep(self, batch: Batch) -> Batch:
        return batch


@pytest.mark.parametrize("most", [1, 5, 100])
def test_completions_come_in_chunks_wherever_their_tokens_are(
    tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "_WRITTEN_TOKENS", most)
    batch = elsewhere(rollouts()).fetch(fields.GROUP)
    advantages = batch.jagged(fields.LOSS_MASK)
    graded = judged([Grade(float(row), {"form": 1.0} if row == 3 else {}) for row in range(4)], batch)
    assert [len(rows) for rows in graded.chunks(most)] == {1: [1, 1, 1, 1], 5: [2, 1, 1], 100: [4]}[most]
    assert [text for rows in graded.chunks(most) for text in graded.texts(rows)] == ["c", "de", "a", "fff"]
    with CompletionsLog(CompletionsWriter(tmp_path)) as log:
        log.write(1, graded, advantages)
    table = pq.read_table(tmp_path / "step-000001.parquet").to_pydict()
    assert table["tokens"] == [[6], [7, 8], [3, 4], [9, 9, 9]]
    assert table["completion"] == ["c", "de", "a", "fff"]
    assert table["advantage"] == [1.0, 1.0, 1.0, 1.0]
    assert table["reward_form"] == [None, None, None, 1.0]


def test_one_sample_a_prompt() -> None:
    grades = [Grade(score) for score in (1.0, 0.0, 0.5, 0.5)]
    assert judged(grades).samples(5) == (Sample("p", "c", 1.0, "x"), Sample("q", "a", 0.5, None))


def test_completions_are_written_with_tokens_grades_and_the_mean_advantage(tmp_path: Path) -> None:
    grades = [Grade(float(row), {"form": 0.1 * row}, correct=row > 2) for row in range(4)]
    advantages = rollouts().jagged(fields.LOSS_MASK)
    with CompletionsLog(CompletionsWriter(tmp_path)) as log:
        log.write(3, judged(grades), advantages.like(advantages.values * torch.arange(14)))
        log.flush()
        table = pq.read_table(tmp_path / "step-000003.parquet").to_pydict()
    assert table["tokens"] == [[6], [7, 8], [3, 4], [9, 9, 9]]
    assert table["reward_form"] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert table["advantage"] == pytest.approx([1.0, 3.5, 7.5, 12.0])
    assert table["correct"] == [False, False, False, True]
    assert table["version"] == [7, 7, 7, 7]


def test_completions_without_grades_are_written_too_and_a_full_disk_is_not_silent(tmp_path: Path) -> None:
    log = CompletionsLog(CompletionsWriter(tmp_path / "there"))
    log.write(1, judged(None), None)
    log.flush()
    table = pq.read_table(tmp_path / "there" / "step-000001.parquet").to_pydict()
    assert all(math.isnan(reward) for reward in table["reward"])
    assert table["advantage"] == [None] * 4
    (tmp_path / "there" / "step-000001.parquet").unlink()
    (tmp_path / "there").rmdir()
    log.write(2, judged(None), None)
    with pytest.raises(FileNotFoundError):
        log.flush()


@pytest.mark.parametrize("text", ["{", '{"step": 1}', '{"stepp": 1, "first": null, "last": null, "best": null}'])
def test_a_state_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trainer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"trainer\.json is not the state of a training run"):
        load_checkpoint(Checkpoint(1, tmp_path), None)  # pyright: ignore[reportArgumentType] - fails before it is used


def test_an_evaluation_of_nothing_has_accuracy_zero() -> None:
    assert Evaluation(step=0, correct=0, items=0, reward_mean=0.0).accuracy == 0.0
    assert TrainerState().step == 0
