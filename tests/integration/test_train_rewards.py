"""Runs with several rewards, with rewards that leave completions out, and with rewards that are edited between runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from podium.errors import ConfigError, RewardError
from podium.runs.run_files import RunFiles
from podium.runs.run_reader import RunRecord
from podium.telemetry import EvalFinished, Event, Note, metrics, subscribe
from podium.trainer import GRPOConfig, PPOTrainer
from podium_view.completions import Completions
from tests.integration.training import metrics_rows, tiny, train
from tests.unit.rewards.test_reward_functions import fails

FILE = """
import asyncio

def digits(completion, row):
    return {"score": float(len(completion)), "sevens": float(completion.count("7"))}

def starts(completions, prompts, completion_ids, answer, log_extra, **kwargs):
    assert all(len(ids) >= len(text) for ids, text in zip(completion_ids, completions))
    log_extra("wanted", answer)
    return [None if text < "5" else 1.0 for text in completions]

async def waits(completion, answer, trainer_state):
    await asyncio.sleep(0)
    return float(trainer_state.global_step) / trainer_state.max_steps
"""
NAMES = ("digits", "starts", "waits")


def table_of(run: Path, step: int) -> dict[str, list[Any]]:
    return pq.read_table(run / "completions" / f"step-{step:06d}.parquet").to_pydict()


def test_a_list_of_rewards_of_all_forms(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(FILE)
    names = [*(f"{path}:{name}" for name in NAMES), "fraction"]
    config = tiny(GRPOConfig, tmp_path, reward={"name": names}, eval={"items": 0})
    run = train(config)
    for step, row in enumerate(metrics_rows(run), 1):
        table = table_of(run, step)
        parts = {name: table[f"reward_{name}"] for name in (*NAMES, "fraction")}
        assert table["reward"] == pytest.approx(
            [sum(part or 0.0 for part in row) for row in zip(*parts.values(), strict=True)]
        )
        assert parts["starts"] == [None if text < "5" else 1.0 for text in table["completion"]]
        assert parts["waits"] == [(step - 1) / 2] * 16
        assert table["reward_digits.sevens"] == [float(text.count("7")) for text in table["completion"]]
        assert table["logged_wanted"] == table["expected"]
        assert row["reward_parts/digits"] == pytest.approx(sum(parts["digits"]) / 16)
        assert row["reward_parts/digits.sevens"] == pytest.approx(sum(table["reward_digits.sevens"]) / 16)
        assert row[metrics.REWARD_MEAN] == pytest.approx(sum(table["reward"]) / 16)
        assert metrics.ABSTAINED not in row
    shown = Completions(RunFiles(run)).group(1, table_of(run, 1)["group"][0])["rows"][0]
    assert {*shown["parts"]} == {*NAMES, "fraction", "digits.sevens"}, "as podium view shows them"
    assert str(path) in json.loads((run / "places.json").read_text())
    assert RunRecord(run).settings["reward.name"] == names


def test_text_of_a_reward_is_kept_with_the_completion_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """verl's rewards return "[INVALID]" for the answer that they did not find. Half a surrogate is no UTF-8."""

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        pred = solution_str if solution_str > "5" else "[INVALID]\ud800"
        return {"score": float(pred == ground_truth), "acc": pred == ground_truth, "pred": pred}

    config = tiny(GRPOConfig, tmp_path, run={"steps": 1, "show_samples": 1}, eval={"items": 0})
    PPOTrainer(config, cluster="inline", reward=compute_score).fit()
    run = tmp_path / "runs" / "run"
    table = table_of(run, 1)
    expected = [text if text > "5" else "[INVALID]?" for text in table["completion"]]
    assert table["logged_pred"] == expected
    rows = Completions(RunFiles(run)).group(1, table["group"][0])["rows"]
    assert [row["logged"] for row in rows] == [{"pred": text} for text in expected[: len(rows)]]
    assert "reward_parts/acc" in metrics_rows(run)[0]
    assert not any("pred" in name for name in metrics_rows(run)[0])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("reward ")]
    assert "acc 0" in line or "acc 1" in line
    assert "pred '" in line


def test_a_reward_that_scores_no_held_out_completion_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the reward returned None for all 4 held-out completions"):
        train(tiny(GRPOConfig, tmp_path), reward=lambda completion: None)
    table = pq.read_table(tmp_path / "runs" / "run" / "evaluations" / "step-000000.parquet").to_pydict()
    assert table["reward"] == [None] * 4


def test_completions_without_a_score_are_not_trained_and_kept(tmp_path: Path) -> None:
    pid, notes = os.getpid(), list[str]()

    def even(completion: str, row: Mapping[str, Any]) -> float | None:
        assert os.getpid() == pid, "on inline a reward runs in the script"
        return float(completion > "5") if int(row["answer"]) % 2 == 0 and completion > "2" else None

    def hear(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)
        if isinstance(event, EvalFinished):
            scored[event.step] = event.items, event.scored

    scored: dict[int, tuple[int, int | None]] = {}
    unsubscribe = subscribe(hear)
    config = tiny(GRPOConfig, tmp_path, batch={"prompts": 8}, reward={"correct_at": 1.0})
    run = train(config, reward=[even, lambda completions: [None]])
    unsubscribe()
    for step in (0, 2):
        rewards = pq.read_table(run / "evaluations" / f"step-{step:06d}.parquet").to_pydict()["reward"]
        assert scored[step] == (4, 4 - rewards.count(None)) and None in rewards
    means: dict[int, list[float]] = {}
    for step, row in enumerate(metrics_rows(run), 1):
        table = table_of(run, step)
        gone = [score is None for score in table["reward"]]
        assert gone == [
            int(answer) % 2 == 1 or text <= "2"
            for answer, text in zip(table["expected"], table["completion"], strict=True)
        ]
        assert 0 < sum(gone) == row[metrics.ABSTAINED] < 32 == len(gone)
        assert gone == sorted(gone), "they come last"
        assert [advantage is None for advantage in table["advantage"]] == gone
        assert table["correct"] == [None if score is None else score == 1.0 for score in table["reward"]]
        means = {}
        for group, score in zip(table["group"], table["reward"], strict=True):
            means.setdefault(group, []).extend([] if score is None else [score])
        for group, score, advantage in zip(table["group"], table["reward"], table["advantage"], strict=True):
            if score is not None:
                above = score - sum(means[group]) / len(means[group])
                assert (advantage > 0) == (above > 0), "the group is that of the completions with a score"
    dropped = sum(not scores for scores in means.values())
    assert (
        json.loads((run / "summary.json").read_text())["dropped"].get("the reward scored no completion", 0) >= dropped
    )
    assert sum("returned None for" in note for note in notes) == 1


def test_sessions_without_a_score_are_not_trained(tmp_path: Path) -> None:
    template, world = tmp_path / "chat.jinja", tmp_path / "world.py"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    world.write_text(
        "async def play(task, client):\n"
        "    await client.chat([{'role': 'user', 'content': task['prompt']}])\n"
        "    await client.chat([{'role': 'user', 'content': task['answer']}])\n"  # a second row of the trajectory
    )

    def above(completion: str, answer: str) -> float | None:
        return float(len(completion)) if completion > "3" else None

    config = tiny(
        GRPOConfig,
        tmp_path,
        environment={"name": f"{world}:play"},
        data={"chat_template": str(template)},
        run={"steps": 1},
        eval={"items": 0},
    )
    run = train(config, reward=above)
    (row,) = metrics_rows(run)
    table = table_of(run, 1)
    kept = {session for session, score in zip(table["session"], table["reward"], strict=True) if score is not None}
    gone = {session for session, score in zip(table["session"], table["reward"], strict=True) if score is None}
    assert not kept & gone
    assert len(kept | gone) == 16
    assert row[metrics.ABSTAINED] == len(gone) > 0
    assert row[metrics.SESSIONS_TRAINED] == len(kept)
    assert row[metrics.SESSIONS_ROWS] == sum(score is not None for score in table["reward"])


def test_a_reward_that_scores_nothing_ends_the_run(tmp_path: Path) -> None:
    def forgets(completion: str, row: Mapping[str, Any]) -> None:
        float(len(completion))

    with pytest.raises(RewardError, match=r"returned None for 16 of 16 completions.*ends without `return`"):
        train(tiny(GRPOConfig, tmp_path, eval={"items": 0}), reward=forgets)


def test_a_reward_may_be_edited_until_a_step_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def score(completion, row):\n    raise ValueError('no such unit')\n")
    section = {"name": f"{path}:score", "processes": 1}
    config = tiny(GRPOConfig, tmp_path, run={"steps": 1}, eval={"items": 0}, reward=section)
    with pytest.raises(RewardError, match="no such unit"):
        train(config, reward=fails)
    assert [*(tmp_path / "runs/run/completions").iterdir()], "what was drawn can be looked at"
    path.write_text("def score(completion, row):\n    return float(len(completion))\n")
    assert [row["step"] for row in metrics_rows(train(config))] == [1]
    with pytest.raises(ConfigError, match="holds a run"):
        train(config)


@pytest.mark.parametrize("given", [False, True])
def test_a_parameter_that_is_no_column_is_refused_before_the_run(tmp_path: Path, given: bool) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def score(completion, gold):\n    return float(completion == gold)\n")
    config = tiny(GRPOConfig, tmp_path, reward={"name": f"{path}:score"})
    reward: Any = (lambda text, gold: float(text == gold)) if given else None
    with pytest.raises(ConfigError, match="'gold' is neither the completion, the row nor a column") as caught:
        train(config, reward=reward)
    assert "(which are answer, prompt)" in str(caught.value)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError, match="'gold' is neither"):
        PPOTrainer(config, cluster="inline", reward=reward).read_data()  # as a dry run does


def test_the_sum_of_several_rewards_is_no_verdict(tmp_path: Path) -> None:
    """A wrong answer in the right format had the score 1, counted as correct, and accuracy judged the run."""

    def right(completion: str, row: Mapping[str, Any]) -> float:
        return 0.0

    def tidy(completion: str, row: Mapping[str, Any]) -> float:
        return float(completion > "3")

    run = train(tiny(GRPOConfig, tmp_path), reward=[right, tidy])
    rows = metrics_rows(run, "eval")
    assert {row["metric"] for row in rows} == {"reward_mean"}
    assert all("accuracy" not in row and row["reward_parts/right"] == 0.0 for row in rows)
    assert max(row["reward_parts/tidy"] for row in rows) > 0
    assert all(metrics.ACCURACY not in row for row in metrics_rows(run))
    for table in (table_of(run, 1), pq.read_table(run / "evaluations" / "step-000000.parquet").to_pydict()):
        assert {*table["correct"]} == {None}
