"""The sessions of a run: how long a call that lives them may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from podium.rollout.environments.config import EnvironmentConfig
from podium.rollout.sampling import SamplingParams
from podium.runs.config import InferenceConfig, RunConfig
from podium.trainer.sessions import Sessions


@pytest.mark.parametrize(
    ("options", "sessions", "first_s", "second_s"),
    [
        ({}, 512, 1800.0, 3600.0),  # both ranks have room for all
        ({}, 514, 3600.0, 5400.0),
        ({"at_once": 4}, 80, 18000.0, 36000.0),
        ({"at_once": 4, "processes": 2}, 80, 36000.0, 72000.0),
        ({"at_once": 1}, 1, 1800.0, 3600.0),  # both calls are for the first rank
        ({"time_limit_s": 7200.0}, 10, 7260.0, 7260.0),  # a session ends by its own limit, and is counted
    ],
)
def test_sessions_that_wait_for_room_have_longer(
    options: dict[str, Any], sessions: int, first_s: float, second_s: float
) -> None:
    config = InferenceConfig(run=RunConfig(timeout_s=1800.0), environment=EnvironmentConfig(options=options))
    workers = cast("Any", SimpleNamespace(group=SimpleNamespace(world_size=2)))
    lived = Sessions(workers, (), config, SamplingParams(max_new_tokens=8))
    with lived.count_sessions(sessions) as first, lived.count_sessions(sessions) as second:
        assert (first, second) == (first_s, second_s), "the second waits for the first"
    with lived.count_sessions(sessions) as again:
        assert again == first_s
