"""The sessions of a run: how long a call that lives them may take, and what is told of them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from podium.data import Batch, fields
from podium.errors import NoRowsError
from podium.rollout.environments import EnvironmentConfig
from podium.rollout.sampling import SamplingParams
from podium.runs.config import InferenceConfig
from podium.runs.sections import RunConfig
from podium.telemetry import Event, Note, metrics, subscribe
from podium_agents.sessions import Sessions


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


def test_the_first_edited_history_and_other_names_of_the_model_are_told_once() -> None:
    report = dict.fromkeys(("sessions", "turns"), 2) | dict.fromkeys(
        ("context_full", "sampled", "splits", "tool_calls", "tool_errors", "unknown"), 0
    )
    report |= {
        "failures": Counter(),
        "details": {},
        "seconds": [1.0],
        "waits_s": [0.5],
        "overruled": {},
        "limits": Counter(turn_limit=1),
        "aliases": ["gpt-x"],
    }
    reports = [
        {**report, "unrecognized": 2, "departure": "message 2 has x"},
        {**report, "unrecognized": 0, "departure": ""},
    ]
    empty = torch.zeros(1, dtype=torch.int64)
    columns = dict.fromkeys((fields.GROUP, fields.VERSION_RANGE, fields.TRAJECTORY, fields.SESSION), empty)
    batch = Batch({**columns, fields.GRADE: [SimpleNamespace(score=1.0, full=False)]})
    call = SimpleNamespace(wait=lambda _: True, result=lambda: batch)
    live = SimpleNamespace(within=lambda timeout_s: SimpleNamespace(submit=lambda *_: call))
    workers = SimpleNamespace(
        group=SimpleNamespace(world_size=2), live=live, notes=list, report=lambda key: [dict(one) for one in reports]
    )
    config = InferenceConfig(environment=EnvironmentConfig(options={"turn_limit": 1, "read_limit": 2}))
    sessions = Sessions(cast("Any", workers), (), config, SamplingParams(max_new_tokens=8))
    notes: list[Event] = []
    unsubscribe = subscribe(notes.append)
    try:
        for step in range(2):
            sessions.live([], torch.zeros(0, 1, dtype=torch.int64), SamplingParams(max_new_tokens=8), step)
            found = sessions.describe(step)
            assert found[metrics.SESSIONS_UNRECOGNIZED] == 2
            figures = {name: value for name, value in found.items() if name.endswith("_limit")}
            assert figures == {"sessions/turn_limit": 0.5, "sessions/read_limit": 0}
    finally:
        unsubscribe()
    texts = [note.text for note in notes if isinstance(note, Note)]
    assert len(texts) == 2
    assert "'gpt-x'" in texts[0]
    assert "message 2 has x" in texts[1]


def make_report(sessions: int, *, seconds: list[float], failed: int = 0, **counts: int) -> dict[str, Any]:
    """What a worker reports of a call."""
    names = ("context_full", "turns", "sampled", "splits", "unrecognized", "tool_calls", "tool_errors", "unknown")
    return {
        **dict.fromkeys(names, 0),
        **{"sessions": sessions, "seconds": seconds, "failures": Counter({"it broke": failed} if failed else {})},
        **{"details": {}, "waits_s": [], "overruled": {}, "limits": Counter(), "aliases": [], "departure": ""},
        **counts,
    }


def test_the_figures_of_a_step_are_those_of_all_sessions_of_all_its_draws() -> None:
    """With a filter of batch.prompts they were those of the first draw, and the median was the upper of two."""
    drawn = [
        [make_report(2, seconds=[1.0, 2.0], turns=4, sampled=10), make_report(1, seconds=[9.0], turns=3, sampled=7)],
        [make_report(3, seconds=[4.0, 5.0, 6.0], failed=3, turns=5, tool_calls=4, tool_errors=1), {}],
        [make_report(2, seconds=[50.0, 60.0], turns=9)],  # an evaluation
    ]
    columns = dict.fromkeys(
        (fields.GROUP, fields.VERSION_RANGE, fields.TRAJECTORY, fields.SESSION), torch.zeros(1, dtype=torch.int64)
    )
    filled = Batch({**columns, fields.GRADE: [SimpleNamespace(score=1.0, full=False)]})
    batches = [filled, filled.slice(0, 0), filled]
    call = SimpleNamespace(wait=lambda _: True, result=lambda: batches.pop(0))
    live = SimpleNamespace(within=lambda timeout_s: SimpleNamespace(submit=lambda *_: call))
    workers = SimpleNamespace(
        group=SimpleNamespace(world_size=2), live=live, notes=list, report=lambda key: drawn.pop(0)
    )
    sessions = Sessions(cast("Any", workers), (), InferenceConfig(), SamplingParams(max_new_tokens=8))
    seeds, sampling = torch.zeros(0, 1, dtype=torch.int64), SamplingParams(max_new_tokens=8)
    sessions.live([], seeds, sampling, 1)
    with pytest.raises(NoRowsError, match="all 3 sessions"):
        sessions.live([], seeds, sampling, 1)
    sessions.live([], seeds, sampling, 1, training=False)
    figures = sessions.describe(1)
    assert figures[metrics.SESSIONS_FAILED] == 3 / 6
    assert figures[metrics.SESSIONS_TURNS] == 12 / 6
    assert (figures[metrics.SESSIONS_TOOL_CALLS], figures[metrics.SESSIONS_TOOL_ERRORS]) == (4 / 6, 1 / 4)
    assert (figures[metrics.SESSION_S_MEDIAN], figures[metrics.SESSION_S_MAX]) == (4.5, 9.0)
    assert figures[metrics.SAMPLED] == 17
    assert sessions.describe(1) == sessions.describe(2) == {}
