"""What a script gives a run beside its configuration: a reward function, classes for roles.

A configuration file cannot hold them, so `podium train … --resume` of such a run would go on with others and say
nothing. Their names are kept in each checkpoint instead, and a resume that lacks them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from podium.errors import ConfigError
from podium.rewards import RewardFn
from podium.runtime import Bound
from podium.trainer.roles import RoleWorkers

__all__ = ["check_given", "names_of_given"]

_REWARD, _REWARD_NAME = "reward", "reward.name"


def names_of_given(reward: RewardFn | None, reward_name: str, workers: RoleWorkers | None) -> dict[str, str]:
    """The names of what was given, by role; "reward" is the function, "reward.name" what it stood in for."""
    given = {
        role: _name(worker.cls if isinstance(worker, Bound) else worker) for role, worker in (workers or {}).items()
    }
    return given if reward is None else {**given, _REWARD: _name(reward), _REWARD_NAME: reward_name}


def check_given(before: Mapping[str, str], now: Mapping[str, str], reward_name: str) -> None:
    """Compare what the run had with what its resume has.

    Raises:
        ConfigError: a role's class is missing; or the reward function is, and ``reward.name`` is the one from before.
    """
    missing = [name for name in before if name not in now and name not in (_REWARD, _REWARD_NAME)]
    if _REWARD in before and _REWARD not in now and before.get(_REWARD_NAME) == reward_name:
        missing.append(_REWARD)
    if missing:
        what = ", ".join(f"{name} ({before[name]})" for name in missing)
        remedy = ", or name a reward with reward.name" if missing == [_REWARD] else ""
        raise ConfigError(
            f"this run was given its own {what} from Python, which its config.yaml cannot hold: resume it from the "
            f"script that gave it, with run.resume{remedy}"
        )


def _name(given: object) -> str:
    return f"{getattr(given, '__module__', '?')}.{getattr(given, '__qualname__', type(given).__name__)}"
