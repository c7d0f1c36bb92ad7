"""The contract of an environment. It knows nothing of training, of workers or of the engine.

    an async function    async def play(task, client) -> reward        the agent's own loop, or any agent's
    a plain function     def play(task, client) -> reward              the same in a thread, for agents that block
    a class              reset(task) -> what is said first             Podium talks with the model
                         step(answer) -> Step

``task`` is a row of the data. ``client`` is a conversation partner: :class:`~podium_agents.Client`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from podium.errors import PodiumError

__all__ = ["Earned", "Environment", "Messages", "Outcome", "Reward", "SessionError", "Step", "Task"]

Task: TypeAlias = Mapping[str, Any]
"""A row of the data: all its columns, and "prompt" and "answer" beside them."""

Messages: TypeAlias = str | Sequence[Mapping[str, Any]]
"""What is said to the model: the text of a user's message, or messages as the OpenAI API has them."""

Reward: TypeAlias = "float | Mapping[str, float] | Outcome | None"
"""What a session earned: a number; named parts with "score"; or None, where ``reward.name`` scores the last answer."""


class SessionError(PodiumError):
    """An error that fails the session. Raised by a tool, it is not told to the model, and the session is not trained
    on: what the model said is not to blame, such as for a server that does not answer.
    """


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a session, if it is more than one number.

    Attributes:
        score: The reward of the whole session; None if ``reward.name`` scores the last answer.
        parts: Named parts of the reward, which are metrics, and which the estimator ``gdpo`` learns.
        agents: The rewards of agents with a reward of their own (``client.agent(name)``), by name. Other agents share
            ``score``.
    """

    score: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    agents: Mapping[str, float] = field(default_factory=dict)


class Earned(NamedTuple):
    """What an agent has earned in a session that is over.

    Attributes:
        score: The reward of the whole session; None if ``reward.name`` scores the last answer.
        parts: Its named parts.
        of_turns: The sum of the rewards of turns.
        full: Whether the session ended because the model's context was full. It is not correct then.
    """

    score: float | None
    parts: Mapping[str, float]
    of_turns: float
    full: bool


@dataclass(frozen=True, kw_only=True)
class Step:
    """The answer of an environment to the model.

    Attributes:
        say: The next message to the model; None or "" once the session is over.
        reward: The reward of this turn. The rewards of all turns add up.
        done: Whether the session is over.
        parts: Named parts of the session's reward, as in :class:`Outcome`. Those of later steps replace earlier ones.
    """

    say: Messages | None = None
    reward: float = 0.0
    done: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """An environment that answers the model. Each session has an instance of its own; both methods may be ``async``.

    It may also have ``tools``, a list of functions that the model may call while it answers, and ``tasks(split)``,
    a class method that returns the rows of "train" or "test" if the data have none.
    """

    def reset(self, task: Task) -> Messages:
        """Begin a session, and return the first message to the model."""
        ...

    def step(self, answer: str) -> Step:
        """Answer the model's message."""
        ...
