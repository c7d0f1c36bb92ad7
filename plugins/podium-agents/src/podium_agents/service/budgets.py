"""What a session may use before it ends: answers of the model, tokens that it samples and reads, and calls of tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from podium.rollout.environments import BUDGETS
from podium_agents.service.request_bodies import Refusal

__all__ = ["LIMIT_REACHED", "Budget"]

LIMIT_REACHED: Final = "session_limit_reached"
"""The code of a request that is refused because its session has used what it may."""


class Budget:
    """Counts what a session and its agents use, and refuses further requests once a limit is reached.

    Requests that overlap are counted when they begin, their sampled tokens when they have their answer.

    Args:
        limits: The limits, by name; 0 and a missing one are none.

    Attributes:
        reached: The name of the limit by which a request was refused; "" for none.
    """

    def __init__(self, limits: Mapping[str, int] | None = None) -> None:
        self._limits = {name: limit for name, limit in (limits or {}).items() if limit}
        self._used = Counter[str]()
        self.reached = ""

    def begin(self, prompt: int, completions: int, most: int | None) -> int | None:
        """Count a request, and return the most tokens of each of its completions, which are ``most`` at first.

        Raises:
            Refusal: The session has used up what it may, or the prompt is longer than what it may still read.
        """
        wanted = {"turn_limit": completions, "sampled_limit": completions, "read_limit": prompt, "tool_call_limit": 0}
        for name, limit in self._limits.items():
            if self._used[name] + wanted[name] > limit:
                self.reached = name
                raise Refusal(
                    400,
                    f"the session has used {self._used[name]} {BUDGETS[name]} and this request needs {wanted[name]} "
                    f"more; environment.options.{name} = {limit} ends it here",
                    code=LIMIT_REACHED,
                )
        self._used.update(turn_limit=completions, read_limit=prompt)
        if sampled := self._limits.get("sampled_limit"):
            left = (sampled - self._used["sampled_limit"]) // completions
            return left if most is None else min(most, left)
        return most

    def record(self, sampled: int, tool_calls: int) -> None:
        """Count what an answer used."""
        self._used.update(sampled_limit=sampled, tool_call_limit=tool_calls)
