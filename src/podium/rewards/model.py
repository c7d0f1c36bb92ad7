"""The reward ``model``: the score of a reward model."""

from collections.abc import Mapping
from typing import Any

from podium.rewards.columns import reads

__all__ = ["model"]


@reads("model_score")
def model(completion: str, row: Mapping[str, Any]) -> float:
    """Return the score that the model of ``reward.path`` gave the completion."""
    return row["model_score"]
