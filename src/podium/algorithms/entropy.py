"""The coefficient of the entropy bonus, which follows a target. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from podium.config import build_config, section
from podium.errors import ConfigError


@section("algorithm.entropy_coef")
class EntropyTarget:
    """How the coefficient of the entropy bonus follows the entropy. They are the entries of ``algorithm.entropy_coef``,
    where that is a mapping. The defaults are those of the scripts of Skywork-OR1."""

    target: float = Field(default=0.2, gt=0, le=100)
    """The policy's entropy is kept from falling below this many nats a token."""
    delta: float = Field(default=1e-4, gt=0, le=1e6)
    """The coefficient grows by this after a step whose entropy was below the target, and else falls by it."""
    start: float = Field(default=0.0, ge=0, le=1e6)
    """The coefficient of the first step."""
    min: float = Field(default=0.0, ge=0, le=1e6)
    """The coefficient is at least this."""
    max: float = Field(default=0.005, ge=0, le=1e6)
    """The coefficient is at most this."""

    def __post_init__(self) -> None:
        if not self.min <= self.start <= self.max:
            raise ConfigError(
                f"algorithm.entropy_coef.start = {self.start} with min = {self.min} and max = {self.max}: expected a "
                "start between them"
            )


@dataclass(frozen=True, kw_only=True)
class EntropyController:
    """The coefficient of the entropy bonus: He et al. 2025, "Skywork Open Reasoner 1", arXiv:2505.22312, section 3.2.5.

    ``c += delta`` after a step whose entropy was below the target, ``c -= delta`` after any other, within min and max.
    The bonus counts only while the entropy is below the target. The entropy of a step is that of its update, so that it
    acts from the next step on; the authors' code, which measures it in a pass before the update, uses it at once.
    Without a target the coefficient stays.

    >>> controller = EntropyController(value=0.0, target=EntropyTarget(target=0.5, delta=0.001))
    >>> controller.next(0.4).coef, controller.next(0.4).next(0.6).coef
    (0.001, 0.0)

    Attributes:
        value: c.
        target: The settings; None for a constant coefficient.
        counts: Whether the bonus counts in the next step.
    """

    value: float
    target: EntropyTarget | None = None
    counts: bool = True

    @classmethod
    def of(cls, setting: float | Mapping[str, Any]) -> EntropyController:
        """That of ``algorithm.entropy_coef``. Raises ConfigError for an entry that is wrong."""
        if not isinstance(setting, Mapping):
            return cls(value=setting)
        target = build_config(EntropyTarget, setting, key="algorithm.entropy_coef")
        return cls(value=target.start, target=target)

    @property
    def coef(self) -> float:
        """The coefficient of the next step."""
        return self.value if self.counts else 0.0

    def next(self, entropy: float | None) -> EntropyController:
        """Return the controller after a step of this mean entropy (nats a token); None if it was not measured."""
        if self.target is None or entropy is None:
            return self
        below = entropy < self.target.target
        value = self.value + (self.target.delta if below else -self.target.delta)
        return replace(self, value=min(max(value, self.target.min), self.target.max), counts=below)
