"""The settings of learning from preferences: which loss, and its constants. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field

from podium.config import section

__all__ = ["PREFERENCE_LOSSES", "PreferenceConfig", "ScorerConfig"]

PREFERENCE_LOSSES: Final[Mapping[str, str]] = {
    name: f"podium.algorithms.losses.{name}:{name}" for name in ("dpo", "ipo", "kto", "orpo", "simpo", "bradley_terry")
}
"""The losses of preferences by name, and where each is."""
_WITH_REFERENCE: Final = ("dpo", "ipo", "kto")


@section("algorithm")
class ScorerConfig:
    """The objective of a reward model: that of Bradley and Terry."""

    options: Mapping[str, Any] = Field(default_factory=dict)
    """These options belong to the loss, which declares them."""

    @property
    def loss_name(self) -> str:
        """The name of the loss."""
        return "bradley_terry"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the model with a reference."""
        return False

    @property
    def reads_labels(self) -> bool:
        """Whether the loss is one of single answers with labels, and compares them with mismatched answers."""
        return False


@section("algorithm")
class PreferenceConfig(ScorerConfig):
    """The objective of a policy that learns from preferences."""

    options: Mapping[str, Any] = Field(default_factory=dict)
    """These options belong to the loss, which declares them."""
    loss: Literal["dpo", "ipo", "kto", "orpo", "simpo"] = "dpo"
    """This function is the loss of preferences: dpo, ipo, orpo or simpo of pairs, or kto, of answers with labels
    or of pairs."""

    @property
    def loss_name(self) -> str:
        return self.loss

    @property
    def needs_reference(self) -> bool:
        return self.loss in _WITH_REFERENCE

    @property
    def reads_labels(self) -> bool:
        return self.loss == "kto"
