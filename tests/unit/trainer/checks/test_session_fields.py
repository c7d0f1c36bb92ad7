"""Fields of rows that only sessions with tools or environments read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from podium.rollout.environments import EnvironmentConfig
from podium.rollout.tasks import Example
from podium.trainer import GRPOConfig
from podium.trainer.checks.session_fields import describe_session_fields


def describe(config: GRPOConfig, **columns: Any) -> list[str]:
    example = Example("2 + 3", "5", {"prompt": "2 + 3", "answer": "5", **columns})
    return [*describe_session_fields(config, [example, example])]


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (
            {"extra_info": {"index": 0, "tools_kwargs": {"search": {"create_kwargs": {"a": "5"}}}}},
            "extra_info.tools_kwargs",
        ),
        ({"extra_info": {"need_tools_kwargs": True}}, "extra_info.need_tools_kwargs"),
        ({"extra_info": {"interaction_kwargs": {"name": "gsm8k"}}}, "extra_info.interaction_kwargs"),
        ({"agent_name": "tool_agent"}, "agent_name"),
        ({"environment": "wordle"}, "environment"),
        ({"env_class": "text2sql"}, "env_class"),
    ],
)
def test_a_field_that_only_a_session_reads_is_told(columns: dict[str, Any], name: str) -> None:
    (sentence,) = describe(GRPOConfig(), **columns)
    assert sentence.startswith(f"2 rows have a value in {name!r}, which sessions with tools")
    environment = EnvironmentConfig(name="play.py:play")
    assert describe(replace(GRPOConfig(), environment=environment), **columns) == []


@pytest.mark.parametrize(
    "columns",
    [
        {"extra_info": {"index": 0, "split": "train", "tools_kwargs": {}, "need_tools_kwargs": False}},
        {"agent_name": "single_turn_agent", "environment": None, "env_id": 3},
        {"ability": "math", "toolbox": "hammer", "tools": []},
    ],
)
def test_other_fields_are_not(columns: dict[str, Any]) -> None:
    assert describe(GRPOConfig(), **columns) == []


def test_one_row_is_counted_in_the_singular() -> None:
    example = Example("2 + 3", "5", {"prompt": "2 + 3", "answer": "5", "env": {"seed": 1}})
    (sentence,) = describe_session_fields(GRPOConfig(), [example])
    assert sentence.startswith("1 row has a value in 'env', ")
