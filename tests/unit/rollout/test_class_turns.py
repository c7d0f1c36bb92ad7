"""The answers of a session of a class with ``reset`` and ``step``, whose model also calls tools."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from podium.rollout.environments import EnvironmentConfig, SessionLimits
from podium.rollout.sampling import SamplingParams
from podium_agents import Step, Toolbox
from podium_agents.environments import resolve
from podium_agents.environments.runner import Episode, live
from tests.unit.rollout.service.scripted import scripted

CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "x"}}\n</tool_call><|im_end|>'
WORD = "up<|im_end|>"
HEARD: list[str] = []
LOOKED: list[str] = []


def look(place: str) -> str:
    """Look."""
    LOOKED.append(place)
    return "nothing"


class Unbounded:
    """Never ends, and hears what the model says."""

    tools: object = (look,)

    def reset(self, task: object) -> str:
        """Begin."""
        return "Go."

    def step(self, answer: str) -> Step:
        """Ask again."""
        HEARD.append(answer)
        return Step(say="go on", reward=0.5)


class Three(Unbounded):
    """Ends after three answers."""

    max_turns = 3


class Box(Three):
    """The same with a box of tools."""

    tools = Toolbox([look])


class Many(Unbounded):
    """Ends after more answers than a conversation has by itself."""

    max_turns = 15


class Without(Three):
    """Has no tools."""

    tools = ()


class Never(Unbounded):
    """Ends before the first answer."""

    max_turns = 0


def lived(name: str, answers: Sequence[str]) -> Episode:
    HEARD.clear()
    LOOKED.clear()
    service, _, _ = scripted(*answers)
    service.rules = SamplingParams(max_new_tokens=512)
    play = resolve.resolve_environment(EnvironmentConfig(name=f"{__name__}:{name}")).play
    (episode,) = asyncio.run(live(play, [{}], [0], ["s"], service, SessionLimits(), address=lambda: ""))
    return episode


@pytest.mark.parametrize(
    ("name", "answers", "heard", "looked", "rewards"),
    [
        ("Three", [CALL, WORD, WORD], ["up", "up"], 1, {1: 0.5, 2: 0.5}),
        ("Three", [CALL, CALL, WORD], ["up"], 2, {2: 0.5}),
        ("Three", [CALL, CALL, CALL], [], 2, {}),
        ("Three", [WORD, WORD, CALL], ["up", "up"], 0, {0: 0.5, 1: 0.5}),
        ("Box", [WORD, CALL, CALL], ["up"], 1, {0: 0.5}),
        ("Many", [*[CALL] * 12, WORD, CALL, WORD], ["up", "up"], 13, {12: 0.5, 14: 0.5}),
        ("Without", [WORD, CALL, WORD], ["up", CALL.removesuffix("<|im_end|>"), "up"], 0, {0: 0.5, 1: 0.5, 2: 0.5}),
    ],
)
def test_max_turns_counts_all_answers_and_calls_that_are_left_open_are_no_answer(
    name: str, answers: list[str], heard: list[str], looked: int, rewards: dict[int, float]
) -> None:
    episode = lived(name, [*answers, "too many"])
    (trajectory,) = episode.trajectories
    assert (episode.failure, episode.truncated, trajectory.score) == ("", False, 0.0)
    assert len(trajectory.session.calls) == len(answers)
    assert (HEARD, len(LOOKED), dict(trajectory.turn_rewards)) == (heard, looked, rewards)


def test_a_session_of_no_answers_asks_nothing() -> None:
    episode = lived("Never", ["too many"])
    assert (episode.failure, [*episode.trajectories], HEARD) == ("", [], [])


@pytest.mark.parametrize("answers", [[CALL] * 4, [CALL, WORD, CALL, WORD], [WORD, CALL, CALL, CALL]])
def test_without_max_turns_a_session_that_is_not_over_fails_by_all_answers(
    answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "_MOST_TURNS", 4)
    episode = lived("Unbounded", [*answers, "too many"])
    assert "Unbounded is not over after 4 answers" in episode.failure
    assert len(episode.trajectories[0].session.calls) == 4
    assert "" not in HEARD
