"""The metric that judges a run: a figure of its held-out evaluations, with its direction, its unit and its words."""

import math
import re
from dataclasses import dataclass
from typing import Final

from podium.telemetry import metrics
from podium.telemetry.formatting import percent, plain

ACCURACY: Final = "accuracy"  # share of the prompts whose completion is correct, or whose better answer is preferred
REWARD: Final = "reward_mean"
REWARD_MARGIN: Final = "reward_margin"  # mean difference of the rewards of a better answer and of a worse one
LOSS: Final = "loss"  # mean cross-entropy of the learned tokens, in nats, or mean loss of preferences
TOKEN_ACCURACY: Final = "token_accuracy"  # share of the learned tokens that are the most probable ones
PERPLEXITY: Final = "perplexity"  # e to the loss
PASS: Final = "pass@"  # + k: share of the prompts of which one of k completions is correct, estimated without bias
MAJ: Final = "maj@"  # + k: share of the prompts of which the most frequent answer of k completions is correct
LENGTH: Final = "completion_tokens"  # mean number of tokens of a completion
CUT_OFF: Final = "cut_off"  # share of the completions that ended by length
SOURCES: Final = "sources/"  # + NAME/FIGURE: a figure over the prompts of one of several sources of the data

_TITLES: Final = {
    REWARD: "reward",
    REWARD_MARGIN: "reward margin",
    TOKEN_ACCURACY: "token accuracy",
    LENGTH: "tokens",
    CUT_OFF: "cut off",
}
_DRAWN: Final = re.compile(r"(?:pass|maj)@([1-9]\d{0,5})")
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
        if self.name.startswith(SOURCES):
            source, _, figure = self.name.removeprefix(SOURCES).rpartition("/")
            return f"{Metric(figure).title} of {source}"
        return _TITLES.get(self.name, self.name.replace(metrics.REWARD_PART_PREFIX, "reward part "))

    @property
    def higher_is_better(self) -> bool:
        """Whether larger values are better ones."""
        return self._kind not in (LOSS, PERPLEXITY, LENGTH, CUT_OFF)

    @property
    def is_share(self) -> bool:
        """Whether the values are shares of 0..1."""
        return self._kind in (ACCURACY, TOKEN_ACCURACY, CUT_OFF) or count_draws(self._kind) > 0

    @property
    def is_of_answers(self) -> bool:
        """Whether answers of the data are scored, and no completion is drawn. An accuracy may be of either."""
        return self._kind in (LOSS, PERPLEXITY, TOKEN_ACCURACY, REWARD_MARGIN)

    @property
    def counts_tokens(self) -> bool:
        """Whether the unit is a token, so that values of different tokenizers do not compare."""
        return self._kind in (LOSS, PERPLEXITY, TOKEN_ACCURACY, LENGTH, CUT_OFF)

    @property
    def _kind(self) -> str:
        """The figure without a source."""
        return self.name.rpartition("/")[2] if self.name.startswith(SOURCES) else self.name

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


def count_draws(figure: str) -> int:
    """Return the k of a figure pass@k or maj@k, and 0 for any other figure."""
    match = _DRAWN.fullmatch(figure)
    return int(match[1]) if match else 0
