"""Settings of an environment. Imports no torch."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from podium.config import build_config, section
from podium.functions import check_function_name

__all__ = ["NAMED_ENVIRONMENTS", "EnvironmentConfig", "SessionLimits"]

NAMED_ENVIRONMENTS: Final[Mapping[str, str]] = {
    "openenv": "podium.rollout.environments.adapters.openenv:OpenEnv",
    "textarena": "podium.rollout.environments.adapters.textarena:TextArena",
    "verifiers": "podium.rollout.environments.adapters.verifiers:Verifiers",
}
"""Environments of other projects by their names, and where the adapter of each is."""


@section("environment.options")
class SessionLimits:
    """Options that every environment has, beside its own."""

    time_limit_s: float = Field(default=600.0, gt=0, le=1e6)
    """A session lasts at most this many seconds. One that lasts longer ends, and is not trained."""
    at_once: int = Field(default=256, ge=1, le=65536)
    """Each rollout worker lives at most this many sessions at the same time."""
    processes: int = Field(default=0, ge=0, le=1024)
    """Each session lives in a process of its own, at most this many at the same time in each rollout worker. With 0,
    sessions share the worker's process."""

    @property
    def side_by_side(self) -> int:
        """How many sessions a rollout worker lives at the same time."""
        return min(self.at_once, self.processes or self.at_once)


@section("environment")
class EnvironmentConfig:
    """The environment in which the policy acts, where a prompt and its answer are not all."""

    name: str = ""
    """The policy acts in this environment: openenv, textarena, verifiers, module:function or path/file.py:function. An
    empty name means that each prompt is answered once."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """The environment gets these options. time_limit_s, at_once and processes among them are about its sessions."""

    def __post_init__(self) -> None:
        if self.name:
            check_function_name(self.name, key="environment.name", known=NAMED_ENVIRONMENTS)
            _ = self.limits

    @property
    def limits(self) -> SessionLimits:
        """The limits of its sessions. Raises ConfigError for one that is wrong."""
        names = SessionLimits.__dataclass_fields__
        given = {name: value for name, value in self.options.items() if name in names}
        return build_config(SessionLimits, given, key="environment.options")

    @property
    def own_options(self) -> dict[str, Any]:
        """The options of the environment itself."""
        names = SessionLimits.__dataclass_fields__
        return {name: value for name, value in self.options.items() if name not in names}
