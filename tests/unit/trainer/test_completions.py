"""Completions with their grades, and their Parquet files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import podium
from podium.data import Batch, Jagged, fields
from podium.models import char_tokenizer
from podium.rewards import Grade, Grader, RewardConfig
from podium.rewards.resolve import RewardFn
from podium.rollout.tasks import Example
from podium.runs.run_files import RunFiles
from podium.runtime import Worker, endpoint, first
from podium.telemetry import Sample, metrics
from podium.trainer import completion_files, completions
from podium.trainer.completion_files import CompletionsLog
from podium.trainer.completions import ScoredBatch
from podium.trainer.prompts import Prompt
from podium_agents.environments.contract import Earned
from podium_agents.sessions import grade_sessions
from tests.integration.rewards import length_and_worth


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


PROMPTS = [
    Prompt(torch.tensor([5]), Example("p", "x", {"worth": 1.0}), lambda ids: "p"),
    Prompt(torch.tensor([1, 2]), Example("q", None, {}), lambda ids: "q"),
]


def scored(grades: list[Grade] | None, batch: Batch | None = None, step: int = 1) -> ScoredBatch:
    batch = rollouts() if batch is None else batch
    return ScoredBatch(
        step=step,
        steps_before=step - 1,
        batch=batch,
        prompts=PROMPTS,
        tokenizer=char_tokenizer("abcdef"),
        grades=grades,
    )


@pytest.mark.parametrize("most", [1, 5, 100])
def test_the_versions_of_a_batch_that_only_has_those_of_its_tokens(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_GRADED_TOKENS", most)  # so few are fetched together
    batch = rollouts()
    tokens = batch.jagged(fields.TOKENS)  # of 2, 3, 4 and 5 tokens, with prompts of 1, 1, 2 and 2
    versions = tokens.like(torch.tensor([0, 4, 0, 5, 3, 0, 0, 6, 6, 0, 0, 2, 9, 4]))
    assert completions.version_range(batch.with_columns(versions=versions)).tolist() == [[4, 4], [3, 5], [6, 6], [2, 9]]
    nothing = batch.with_columns(versions=versions, loss_mask=tokens.like(torch.arange(14) < 2))
    assert completions.version_range(nothing).tolist() == [[0, 4], [4, 4], [4, 4], [4, 4]]


def test_metrics_of_completions() -> None:
    found = scored([Grade(score, correct=score == 1.0) for score in (1.0, 0.0, 0.5, 0.5)]).metrics()
    assert found == {
        metrics.ACCURACY: 0.25,
        metrics.TRUNCATED: 0.25,
        metrics.TOKENS: 14.0,
    }


def test_a_failed_grading_has_its_score_in_each_part_that_is_learned() -> None:
    """Estimators that read parts gave it the advantage 0, whatever the failure's score."""
    parts = {"code": 1.0, "format": 0.5, "seconds": 7.0}
    grades = [Grade(1.5, parts, logged=frozenset({"seconds"})), Grade(-1.0, error="ran over 5 s", timed_out=True)]
    grades += [Grade(1.0, {"code": 1.0}), Grade(1.5, parts, logged=frozenset({"seconds"}))]
    graded = scored(None).with_grades(grades, rollouts().dense(fields.REWARDS))
    assert graded.batch.dense(fields.PART + "code").tolist() == [1.0, -1.0, 1.0, 1.0]
    assert graded.batch.dense(fields.PART + "format")[[0, 1, 3]].tolist() == [0.5, -1.0, 0.5]
    assert graded.batch.dense(fields.PART + "format")[2].isnan(), "the reward left this part out itself"
    assert graded.batch.dense("logged/seconds")[1].isnan()
    assert graded.grades is not None
    assert graded.grades[1].parts == {"code": -1.0, "format": -1.0}, "a replay learns from what is written"


def test_a_rule_counts_in_the_parts_that_only_other_draws_have() -> None:
    """A draw may have sessions alone that a limit ended; the parts are those of the whole step."""
    first = scored(None).with_grades([Grade(score, {"right": score}) for score in (1.0, 0.0, 1.0, 1.0)], torch.ones(4))
    ruled = [Grade(0.75, ruled=0.0), Grade(0.0, ruled=0.0), Grade(-1.0, error="ran over 5 s"), Grade(0.5)]
    joined = ScoredBatch.join([first, scored(None).with_grades(ruled, torch.ones(4))])
    right = joined.batch.dense(fields.PART + "right")
    assert right[:7].tolist() == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, -1.0] and right[7].isnan()
    assert joined.grades is not None
    assert [grade.parts.get("right") for grade in joined.grades[4:]] == [0.0, 0.0, -1.0, None]
    again = ScoredBatch.join([scored(None).with_grades(ruled, torch.ones(4)), joined])
    assert again.batch.dense(fields.PART + "right")[[0, 1, 2]].tolist() == [0.0, 0.0, -1.0]


def test_a_session_that_was_ended_has_the_score_of_the_rule_without_rewards_of_turns() -> None:
    numbers = torch.tensor([0, 1, 2, 3])
    earned = [Earned(1.0, {"right": 1.0}, 0.5, False), Earned(0.0, {}, 0.5, True), *[Earned(0.0, {}, 0.0, True)] * 2]
    batch = rollouts().with_columns({fields.TRAJECTORY: numbers, fields.SESSION: numbers, fields.GRADE: earned})
    with Grader(RewardConfig(), in_script=True) as grader:
        graded = grade_sessions(scored(None, batch), grader, RewardConfig())
    assert graded.batch.dense(fields.PART + "right").tolist() == [1.0, 0.0, 0.0, 0.0]
    assert graded.grades is not None and graded.grades[1].score == 0.5


def test_a_part_of_the_reward_that_no_completion_has_is_no_metric() -> None:
    """A filter may drop the groups that have it."""
    grades = [Grade(score, {"a": score} if score == 1.0 else {}) for score in (1.0, 1.0, 0.5, 0.5)]
    graded = scored(None).with_grades(grades, rollouts().dense(fields.REWARDS))
    assert graded.metrics()["reward_parts/a"] == 1.0
    assert "reward_parts/a" not in graded.with_rows([2, 3]).metrics()


def test_the_penalty_for_long_completions_knows_the_limit_of_the_run() -> None:
    """Completions have 1, 2, 2 and 3 tokens, of which 3 are allowed: the penalty begins at 2.4."""
    config = RewardConfig(name=("fraction", "overlong"), weights=(0.0, 2.0))
    prompts = [replace(PROMPTS[0], example=Example("p", "x", {"answer": "x"}))] * 2
    with Grader(config, in_script=True) as grader:
        for most, expected in ((3, [0.0, 0.0, 0.0, -2.0]), (2, [0.0, -2.0, -2.0, -2.0])):
            batch = replace(scored(None), max_new_tokens=most, prompts=prompts)
            assert batch.graded(grader).rewards_B.tolist() == expected


def test_the_mean_reward_of_each_source_of_the_data() -> None:
    batch = scored([Grade(score) for score in (1.0, 0.0, 0.5, 0.5)])
    pairs = zip(PROMPTS, "ab", strict=True)
    sources = [replace(prompt, example=replace(prompt.example, source=name)) for prompt, name in pairs]
    found = replace(batch, prompts=sources).metrics()
    assert {name: value for name, value in found.items() if name.startswith("source_reward/")} == {
        "source_reward/a": 0.5,
        "source_reward/b": 0.5,
    }


def test_a_trajectory_of_two_rows_is_cut_off_if_its_last_row_is() -> None:
    batch = rollouts().with_columns(
        trajectory=torch.tensor([0, 0, 1, 2]), finish_reason=["length", "stop", "stop", "length"]
    )
    found = scored([Grade(1.0)] * 4, batch).metrics()
    assert found[metrics.TRUNCATED] == pytest.approx(1 / 3)


@pytest.mark.parametrize("most", [1, 100])
def test_each_completion_is_graded_with_the_row_of_its_prompt(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_GRADED_TOKENS", most)
    with Grader(reward=length_and_worth) as grader:
        graded = scored(None).graded(grader)
    assert graded.rewards_B.tolist() == [2.0, 3.0, 1.0, 3.0]
    assert graded.batch.dense(fields.REWARDS).tolist() == [2.0, 3.0, 1.0, 3.0]


def test_a_session_whose_score_is_the_sum_of_several_rewards_has_no_verdict() -> None:
    """Those of the environment alone are one reward, also where its turns have some."""

    def once(completion: str) -> float:
        return 1.0

    def never(completion: str) -> float:
        return 0.0

    earned = [
        Earned(score, {}, of_turns, False) for score, of_turns in ((0.0, 1.0), (1.0, 0.0), (None, 0.0), (None, 1.0))
    ]
    batch = scored(None, rollouts().with_columns({fields.TRAJECTORY: torch.arange(4), fields.GRADE: earned}))

    def verdicts(rewards: list[RewardFn], config: RewardConfig) -> list[bool | None]:
        with Grader(config, reward=rewards, in_script=True) as grader:
            return [grade.correct for grade in grade_sessions(batch, grader, config).grades or ()]

    assert verdicts([never], RewardConfig()) == [True, True, False, None]
    assert verdicts([once, never], RewardConfig()) == [True, True, None, None]
    assert verdicts([once, never], RewardConfig(weights=(1.0, 0.0))) == [True, True, True, None]
    assert verdicts([once, never], RewardConfig(correct_at=2.0)) == [False, False, False, True]


def test_agents_without_a_reward_share_that_of_the_sessions_answer() -> None:
    """The reward knows the answer to the task, which a helper does not say."""

    def score(completion: str) -> float | None:
        return {"c": 0.25, "a": None}.get(completion, 9.0)

    for last, expected in ((None, [0.25, 0.25]), (0.5, [0.25, 0.25, 0.5])):
        earned = [Earned(value, {}, 0.0, False) for value in (None, None, None, last)]
        columns = {fields.TRAJECTORY: torch.arange(4), fields.SESSION: torch.tensor([0, 0, 1, 1]), fields.GRADE: earned}
        with Grader(reward=score, in_script=True) as grader:
            graded = grade_sessions(scored(None, rollouts().with_columns(columns)), grader, RewardConfig())
        assert graded.rewards_B.tolist() == expected
        assert graded.left_out is not None and len(graded.left_out.batch) == 4 - len(expected)


def test_a_reward_of_a_session_gets_the_tokens_of_its_last_answer() -> None:
    """A trajectory has two rows, of which the first has the first and the last answer."""
    seen: list[tuple[list[int], list[int]]] = []

    def score(completion: str, completion_ids: list[int], prompt_ids: list[int]) -> float:
        seen.append((prompt_ids, completion_ids))
        return float(len(completion_ids))

    batch = rollouts()  # tokens 5 6, 5 7 8, 1 2 3 4 and 1 2 9 9 9
    turns = batch.jagged(fields.TOKENS).like(torch.tensor([-1, 0, -1, 1, 1, 0, -1, -1, 2, -1, -1, 1, 1, 1]))
    earned = [Earned(None, {}, 0.0, False)] * 4
    columns = {fields.TRAJECTORY: torch.tensor([0, 0, 1, 1]), fields.GRADE: earned, fields.TURN: turns}
    with Grader(reward=score, in_script=True) as grader:
        graded = grade_sessions(scored(None, batch.with_columns(columns)), grader, RewardConfig())
    assert seen == [([5], [7, 8]), ([1, 2, 3], [4])]
    assert graded.rewards_B.tolist() == [2.0, 2.0, 1.0, 1.0]


def test_the_versions_of_each_prompt_and_the_oldest_of_all() -> None:
    ranges = torch.tensor([[3, 4], [2, 2], [5, 5], [5, 7]])
    found = scored(None, rollouts().with_columns({fields.VERSION_RANGE: ranges}))
    assert found.versions() == [(2, 4), (5, 7)]
    assert found.oldest_version() == 2
    assert scored(None).versions() == []
    assert scored(None).oldest_version() is None


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
    monkeypatch.setattr(completion_files, "_WRITTEN_TOKENS", most)
    batch = elsewhere(rollouts()).fetch(fields.GROUP)
    advantages = batch.jagged(fields.LOSS_MASK)
    graded = scored([Grade(float(row), {"form": 1.0} if row == 3 else {}) for row in range(4)], batch)
    assert [len(rows) for rows in graded.chunks(most)] == {1: [1, 1, 1, 1], 5: [2, 1, 1], 100: [4]}[most]
    assert [text for rows in graded.chunks(most) for text in graded.texts(rows)] == ["c", "de", "a", "fff"]
    with CompletionsLog(RunFiles(tmp_path)) as log:
        log.write(graded, Batch({fields.ADVANTAGES: advantages}))
    table = pq.read_table(tmp_path / "step-000001.parquet").to_pydict()
    assert table["tokens"] == [[6], [7, 8], [3, 4], [9, 9, 9]]
    assert table["completion"] == ["c", "de", "a", "fff"]
    assert table["advantage"] == [1.0, 1.0, 1.0, 1.0]
    assert table["reward_form"] == [None, None, None, 1.0]


def test_one_sample_a_prompt() -> None:
    grades = [Grade(score) for score in (1.0, 0.0, 0.5, 0.5)]
    assert scored(grades).samples(5) == (Sample("p", "c", 1.0, "x", 0), Sample("q", "a", 0.5, None, 1))


def test_completions_are_written_with_tokens_grades_and_the_mean_advantage(tmp_path: Path) -> None:
    import pandas as pd

    grades = [Grade(float(row), {"form": 0.1 * row}, correct=row > 2) for row in range(4)]
    advantages = rollouts().jagged(fields.LOSS_MASK)
    with CompletionsLog(RunFiles(tmp_path)) as log:
        weighted = advantages.like(advantages.values * torch.arange(14))
        log.write(scored(grades, step=3), Batch({fields.ADVANTAGES: weighted}))
        log.flush()
        table = pq.read_table(tmp_path / "step-000003.parquet").to_pydict()
    assert table["step"] == [3, 3, 3, 3]
    assert table["group"] == [0, 0, 1, 1]
    assert table["prompt"] == ["p", "p", "q", "q"]
    assert table["expected"] == ["x", "x", None, None]
    assert table["tokens"] == [[6], [7, 8], [3, 4], [9, 9, 9]]
    assert table["reward_form"] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert table["advantage"] == pytest.approx([1.0, 3.5, 7.5, 12.0])
    assert table["correct"] == [False, False, False, True]
    assert table["version"] == [7, 7, 7, 7]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000003.parquet"]
    assert list(pd.read_parquet(tmp_path)["reward"]) == [0.0, 1.0, 2.0, 3.0]


def test_what_is_known_of_each_token_is_written(tmp_path: Path) -> None:
    batch = rollouts()
    tokens = batch.jagged(fields.TOKENS)
    numbers_N = torch.arange(14)
    batch = batch.with_columns(
        {
            fields.VERSIONS: tokens.like(numbers_N),
            fields.KEPT_SIZES: tokens.like(100 + numbers_N),
            fields.ROLLOUT_LOGPROBS: tokens.like(torch.where(numbers_N == 8, -8 + 4e-6, -0.5 * numbers_N)),
        }
    )
    learned = Batch(
        {fields.ADVANTAGES: tokens.like(0.25 * numbers_N), fields.OLD_LOGPROBS: tokens.like(-1.0 * numbers_N)}
    )
    with CompletionsLog(RunFiles(tmp_path)) as log:
        log.write(scored(None, batch), learned)
    table = pq.read_table(tmp_path / "step-000001.parquet").to_pydict()
    places = [[1], [3, 4], [7, 8], [11, 12, 13]]  # of the sampled tokens
    assert table["token_versions"] == places
    assert table["token_kept"] == [[100 + place for place in row] for row in places]
    assert table["token_mismatch"] == [[0.5 * place * (place != 8) for place in row] for row in places], "0 below 5e-6"
    assert table["token_advantages"] == [[0.25 * place for place in row] for row in places]
    assert table["token_chars"] == [[1], [1, 1], [0, 1], [1, 1, 1]]  # id 3 is <unk>, which is not decoded


def test_what_is_not_known_of_tokens_has_no_column(tmp_path: Path) -> None:
    with CompletionsLog(RunFiles(tmp_path)) as log:
        log.write(scored(None), None)
    names = pq.read_schema(tmp_path / "step-000001.parquet").names
    assert [name for name in names if name.startswith("token")] == ["tokens", "token_chars", "token_versions"]


def test_text_without_utf_8_is_written_nevertheless(tmp_path: Path) -> None:
    odd = [replace(PROMPTS[0], decode=lambda ids: "p\ud800"), PROMPTS[1]]
    batch = ScoredBatch(step=1, steps_before=0, batch=rollouts(), prompts=odd, tokenizer=char_tokenizer("abcdef"))
    with CompletionsLog(RunFiles(tmp_path)) as log:
        log.write(batch, None)
    assert pq.read_table(tmp_path / "step-000001.parquet")["prompt"].to_pylist() == ["p?", "p?", "q", "q"]


def test_completions_without_grades_are_written_too_and_a_full_disk_is_not_silent(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    log = CompletionsLog(RunFiles(tmp_path, "there"))
    log.write(scored(None), None)
    log.flush()
    table = pq.read_table(tmp_path / "there" / "step-000001.parquet").to_pydict()
    assert all(math.isnan(reward) for reward in table["reward"])
    assert table["advantage"] == [None] * 4
    (tmp_path / "there" / "step-000001.parquet").unlink()
    (tmp_path / "there").rmdir()
    log.write(scored(None), None)
    with pytest.raises(FileNotFoundError):
        log.flush()
