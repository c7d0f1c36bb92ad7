"""Scores that a rule gives in place of the environment, which count in each part of the reward."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from podium.trainer import GRPOConfig
from tests.integration.training import metrics_rows, tiny, train

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
NONE = {"eval": {"items": 0}, "save": {"model": False, "every": 0}}


async def goes_on(task: Any, client: Any) -> dict[str, float]:
    """A session that earns all parts at once, or after some answers goes on until it is ended."""
    reply = await client.chat("1=")
    for turn in itertools.count(2) if client.seed % 2 else ():
        reply = await client.chat([*reply.messages, {"role": "user", "content": f"{turn % 10}="}])
    return {"score": 1.0, "right": 1.0, "short": 0.5}


async def never_ends(task: Any, client: Any) -> None:
    """A session that goes on until it is ended."""
    reply = await client.chat("1=")
    while True:
        reply = await client.chat([*reply.messages, {"role": "user", "content": "2="}])


async def fails(task: Any, client: Any) -> dict[str, float]:
    """Half of the sessions fail, and the others are right."""
    await client.chat("1=")
    if client.seed % 2:
        raise ValueError("broken")
    return {"score": 1.0, "right": 1.0}


def config_of(folder: Path, world: str, options: dict[str, Any], **sections: Any) -> GRPOConfig:
    (folder / "chat.jinja").write_text(TEMPLATE)
    environment = {"name": f"{__name__}:{world}", "options": options}
    values: dict[str, Any] = {"environment": environment, "data": {"chat_template": str(folder / "chat.jinja")}}
    return tiny(GRPOConfig, folder, **values, run={"steps": 1}, **sections)


@pytest.mark.everyday("turn_limit-gdpo", "full-gdpo")
@pytest.mark.parametrize("advantage", ["gdpo", "grpo"])
@pytest.mark.parametrize(
    "options", [{"turn_limit": 1}, {"sampled_limit": 5}, {"read_limit": 9}, {}], ids=lambda limits: [*limits, "full"][0]
)
def test_a_session_that_reached_a_limit_has_its_score_in_each_part(
    tmp_path: Path, options: dict[str, int], advantage: str
) -> None:
    """Its advantage was 0 with an estimator of parts, however much the others of its group had earned."""
    sections: dict[str, Any] = {"algorithm": {"advantage": advantage}, "batch": {"prompts": 4}, **NONE}
    run = train(config_of(tmp_path, "goes_on", options, **sections))
    (row,) = metrics_rows(run)
    table = pq.read_table(run / "completions/step-000001.parquet").to_pydict()
    assert 0 < row["reward/mean"] < 1
    assert row["reward_parts/right"] == row["reward/mean"] == 2 * row["reward_parts/short"]
    rewards_by_group: dict[int, set[float]] = {}
    for group, reward in zip(table["group"], table["reward"], strict=True):
        rewards_by_group.setdefault(group, set()).add(reward)
    names = ("group", "reward", "reward_right", "reward_short", "advantage")
    for group, reward, right, short, mean in zip(*(table[name] for name in names), strict=True):
        assert (right, short) == (reward, reward / 2)
        assert len(rewards_by_group[group]) == 1 or (mean > 0.1 if reward == 1 else mean < -0.1)


@pytest.mark.parametrize("options", [{}, {"part_weights": {"right": 1.0}}], ids=["all", "named"])
def test_a_step_whose_sessions_all_reached_a_limit_teaches_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    """No session of it says which parts the reward has."""
    algorithm = {"advantage": "gdpo", "options": options}
    run = train(config_of(tmp_path, "never_ends", {"turn_limit": 1}, algorithm=algorithm, batch={"prompts": 2}, **NONE))
    (row,) = metrics_rows(run)
    assert (row["sessions/turn_limit"], row["reward/flat_groups"], row["policy/grad_norm"]) == (1.0, 1.0, 0.0)


def test_sessions_that_fail_count_in_the_part_that_judges_a_run(tmp_path: Path) -> None:
    """A checkpoint whose sessions fail more often was the better one, since the others alone were counted."""
    judged = {"eval": {"items": 8, "metric": "reward_parts/right"}, "save": {"model": False}}
    run = train(config_of(tmp_path, "fails", {}, batch={"prompts": 2}, reward={"failure_score": -1.0}, **judged))
    rows = metrics_rows(run, "eval")
    assert len(rows) == 2
    for row in rows:
        assert row["reward_parts/right"] == row["reward_mean"] < 1
        assert row["items"] == 8
