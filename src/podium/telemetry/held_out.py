"""The metric that judges a run: a figure of its held-out evaluations, with its direction, its unit and its words."""

import math
from dataclasses import dataclass
from typing import Final

from podium.telemetry import metrics
from podium.telemetry.formatting import percent, plain

__all__ = ["ACCURACY", "LOSS", "PERPLEXITY", "REWARD", "REWARD_MARGIN", "TOKEN_ACCURACY", "Metric"]

ACCURACY: Final = "accuracy"  # share of the prompts whose completion is correct, or whose better answer is preferred
REWARD: Final = "reward_mean"
REWARD_MARGIN: Final = "reward_margin"  # mean difference of the rewards of a better answer and of a worse one
LOSS: Final = "loss"  # mean cross-entropy of the learned tokens, in nats, or mean loss of preferences
TOKEN_ACCURACY: Final = "token_accuracy"  # share of the learned tokens that are the most probable ones
PERPLEXITY: Final = "perplexity"  # e to the loss

_TITLES: Final = {REWARD: "reward", REWARD_MARGIN: "reward margin", TOKEN_ACCURACY: "token accuracy"}
_OF_STEPS: Final = {
    ACCURACY: metrics.ACCURACY,
    REWARD: metrics.REWARD_MEAN,
    REWARD_MARGIN: metrics.REWARD_MARGIN,
    LOSS: metrics.LOSS,
}


@dataclass(frozen=True)
class Metric:
    """A figure of evaluations: one of the names above, or ``reward_parts/NAME``, the mean of a part of the reward."""

    name: str

    @property
    def title(self) -> str:
        """The name as people read it."""
        return _TITLES.get(self.name, self.name.replace(metrics.REWARD_PART_PREFIX, "reward part "))

    @property
    def higher_is_better(self) -> bool:
        """Whether larger values are better ones."""
        return self.name not in (LOSS, PERPLEXITY)

    @property
    def is_share(self) -> bool:
        """Whether the values are shares of 0..1."""
        return self.name in (ACCURACY, TOKEN_ACCURACY)

    @property
    def of_steps(self) -> str:
        """The metric of training steps that has the same unit; "" where steps have none."""
        return self.name if self.name.startswith(metrics.REWARD_PART_PREFIX) else _OF_STEPS.get(self.name, "")

    def rank(self, value: float) -> float:
        """Return a number that is larger for a better value. A value that is not finite is the worst."""
        return -math.inf if not math.isfinite(value) else value if self.higher_is_better else -value

    def write(self, value: float) -> str:
        """Write a value with its unit, such as "42.3%"."""
        return percent(value) if self.is_share else plain(value)

    def write_change(self, change: float) -> str:
        """Write the difference of two values, such as "+12.4 points"."""
        return f"{100 * change:+.1f} points" if self.is_share else f"{'+' if change >= 0 else ''}{plain(change)}"
