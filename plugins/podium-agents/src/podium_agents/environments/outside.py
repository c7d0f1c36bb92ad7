"""The environment ``service``: sessions that a service elsewhere opens, runs and rewards over HTTP.

PODIUM_TOKEN=… podium train grpo --environment.name service --environment.options '{ports: 8900}' ...
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, Literal

from podium.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from podium.rollout.environments import EnvironmentConfig
    from podium_agents.environments.client import Client
    from podium_agents.environments.contract import Task
    from podium_agents.environments.runner import Ending

__all__ = ["TOKEN", "Outside", "is_outside", "read_token"]

TOKEN: Final = "PODIUM_TOKEN"
_ROWS: Final = 1000


def is_outside(environment: EnvironmentConfig) -> bool:
    """Whether a service elsewhere runs the sessions of an environment."""
    return bool(environment.name) and environment.code == f"{__name__}:{Outside.__name__}"


def read_token() -> str:
    """Return the token that the service sends. Raises ConfigError if it is not set."""
    if not (token := os.environ.get(TOKEN, "").strip()):
        raise ConfigError(
            f"environment.name = 'service' needs a token, which the service sends as its API key: set the environment "
            f"variable {TOKEN}, as in {TOKEN}=$(openssl rand -hex 32) podium train ..."
        )
    return token


class Outside:
    """Sessions that a service elsewhere lives.

    Args:
        open_limit_s: A session that nobody opens within this many seconds is left out.
        reward_limit_s: A session whose reward does not come within this many seconds after its end is left out.

    Raises:
        ConfigError: A limit is no positive number.
    """

    def __init__(self, open_limit_s: float = 3600.0, reward_limit_s: float = 600.0) -> None:
        for name, value in (("open_limit_s", open_limit_s), ("reward_limit_s", reward_limit_s)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e7:
                raise ConfigError(f"environment.options.{name} = {value!r}: expected a number above 0 and at most 1e7")
        self.open_limit_s, self.reward_limit_s = float(open_limit_s), float(reward_limit_s)

    @property
    def waits_s(self) -> float:
        """How much longer than its time limit a session may last, in seconds."""
        return self.open_limit_s + self.reward_limit_s

    def tasks(self, split: Literal["train", "test"]) -> Sequence[dict[str, Any]]:
        """Return places for tasks that the service has. Those held out have a number, by which the service knows which
        of its tasks are meant.
        """
        if split == "test":
            return [
                {"prompt": f"a held-out task of the service ({number})", "answer": None, "number": number}
                for number in range(_ROWS)
            ]
        return [{"prompt": f"a task of the service ({number})", "answer": None} for number in range(_ROWS)]

    async def play(self, task: Task, client: Client) -> Ending:
        """Offer the session, and wait for its end and its reward."""
        if client.live_outside is None:
            raise ConfigError(
                "environment.name = 'service' needs a rollout worker, which opens sessions for the service: use it in "
                "podium train or podium eval"
            )
        return await client.live_outside(client)
