"""A policy that is trained under a schema: it learns what the schema leaves open, and the trainer draws as the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from podium.telemetry import metrics
from podium.trainer import GRPOConfig
from podium_agents import Client
from tests.integration.training import MODEL, tiny, train

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["xy", "yx", "yy", "xx"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


async def answer(task: Mapping[str, Any], client: Client) -> float:
    """Half of the reward is for each of two fields, which are read as JSON without a net."""
    form = {"type": "json_schema", "json_schema": {"name": "out", "schema": SCHEMA}}
    reply = await client.chat(task["prompt"], response_format=form)
    fields = json.loads(reply.message["content"])
    return 0.5 * (fields["a"] == "yx") + 0.5 * (fields["n"] == 7)


def rewards_of(folder: Path, steps: int, **sections: Any) -> list[float]:
    """The mean reward of each step, after a look at how far the trainer is from the wire."""
    folder.mkdir(exist_ok=True)
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    model = {
        **MODEL,
        "tokenizer": 'chars:{}":,anxy0123456789= ',
        "config": {**MODEL["config"], "max_position_embeddings": 64},
    }
    run = train(
        tiny(
            GRPOConfig,
            folder,
            model=model,
            run={"steps": steps},
            sampling={"max_new_tokens": 40, "n": 8, **sections.pop("sampling", {})},
            environment={"name": f"{__file__}:answer"},
            data={"chat_template": str(folder / "chat.jinja")},
            **sections,
        )
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if metrics.REWARD_MEAN in row]
    assert all(row[metrics.SESSIONS_FAILED] == 0 for row in rows), "an answer was no JSON by the schema"
    assert all(row[metrics.MISMATCH_MAX] < 1e-5 for row in rows if metrics.MISMATCH_MAX in row)
    return [row[metrics.REWARD_MEAN] for row in rows]


def test_every_answer_of_a_run_is_by_the_schema_and_trained_as_drawn(tmp_path: Path) -> None:
    assert len(rewards_of(tmp_path, 2)) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.95}], ids=["plain", "top-p"])
def test_a_tiny_policy_learns_what_a_schema_leaves_open(tmp_path: Path, sampling: dict[str, Any]) -> None:
    rewards = rewards_of(tmp_path, 40, sampling=sampling)
    assert sum(rewards[:3]) / 3 < 0.5
    assert sum(rewards[-3:]) / 3 > 0.9
