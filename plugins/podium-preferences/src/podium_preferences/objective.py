"""Losses of preferences: what they are given, what they return, and how a gradient follows from them.

    values of answers ──▶ loss of a whole step ──▶ its derivative by each value ──▶ weights of the tokens

A value is what a model says of a whole answer: the sum of its log-probabilities, or a reward model's score. The loss
of a step is a function of these values alone. Its derivatives are therefore numbers by answer, and the gradient of the
weights is the sum of each answer's gradient times its derivative. It does not depend on which rows share a micro-batch
or a rank, and a pair may be split.

Legend: A answers, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from podium.algorithms.config import Setting
from podium.algorithms.declarations import declaration_of
from podium.config import build_config
from podium.data import Jagged
from podium.errors import ConfigError, DataError
from podium.functions import load_function, nearest
from podium_preferences.config import PREFERENCE_LOSSES, ScorerConfig

__all__ = [
    "PreferenceInputs",
    "PreferenceLoss",
    "differentiate",
    "explain_options",
    "preference_loss",
    "read_preference_options",
    "weigh_tokens",
]


@dataclass(frozen=True, kw_only=True)
class PreferenceInputs:
    """The answers of a whole step, in the order of their pairs.

    >>> inputs = PreferenceInputs(values_A=torch.tensor([-1.0, -4.0]), chosen_A=torch.tensor([True, False]))
    >>> [values_P.tolist() for values_P in inputs.split(inputs.values_A)]
    [[-1.0], [-4.0]]

    Attributes:
        values_A: float ``[A]``, with gradient: the sum of the log-probabilities of an answer's tokens, in nats, or the
            score of a reward model.
        chosen_A: bool ``[A]``: whether the answer is the better one of its pair, or a desirable one.
        reference_A: float ``[A]``, the values under the reference; None without one.
        lengths_A: int64 ``[A]``, the number of tokens of each answer.
        margins_P: float ``[P]``, by how much the better answer is better; None where the data do not say.
        mismatched_M: float ``[M]``, the log-ratios of answers after the prompts of other rows, for losses of labels.
        paired: Whether the answers are pairs, and not single ones with labels.
    """

    values_A: Tensor
    chosen_A: Tensor
    reference_A: Tensor | None = None
    lengths_A: Tensor | None = None
    margins_P: Tensor | None = None
    mismatched_M: Tensor | None = None
    paired: bool = True

    @property
    def log_ratios_A(self) -> Tensor:
        """``log π(y|x) - log π_ref(y|x)`` of each answer. Raises DataError without a reference."""
        if self.reference_A is None:
            raise DataError("the loss compares the policy with a reference, and this step has none")
        return self.values_A - self.reference_A

    def token_means(self, values_A: Tensor) -> Tensor:
        """The mean over each answer's tokens of a sum over them."""
        if self.lengths_A is None:
            raise DataError("the loss reads the lengths of answers, and this step has none")
        return values_A / self.lengths_A.clamp(min=1)

    def split(self, values_A: Tensor) -> tuple[Tensor, Tensor]:
        """The values of the better answers and of the worse ones, ``[P]`` each, in the order of the pairs."""
        return values_A[self.chosen_A], values_A[~self.chosen_A]


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of a step, whose mean is trained.

    Attributes:
        losses: ``[P]`` of pairs, or ``[A]`` of answers.
        rewards_A: ``[A]``, the reward of each answer that the loss implies, without gradient.
    """

    losses: Tensor
    rewards_A: Tensor


class _Loss(Protocol):
    def __call__(self, inputs: PreferenceInputs, options: Any, /) -> PreferenceLoss: ...


def preference_loss(config: ScorerConfig) -> _Loss:
    """Return the loss that ``config`` names."""
    return load_function(PREFERENCE_LOSSES[config.loss_name], key="algorithm.loss")


def read_preference_options(config: ScorerConfig) -> Any:
    """Return the options of the loss, checked.

    Raises:
        ConfigError: The loss has no option of this name, or its value is out of range.
    """
    section: Any = declaration_of(preference_loss(config)).options
    names = [field.name for field in fields(section)]
    for name, value in config.options.items():
        if name not in names:
            raise ConfigError(
                f"unknown key algorithm.options.{name} (value {value!r}): the options of {config.loss_name} are "
                f"{', '.join(names)}{nearest(name, names)}"
            )
    return build_config(section, dict(config.options), key="algorithm.options")


def differentiate(config: ScorerConfig, inputs: PreferenceInputs) -> tuple[PreferenceLoss, Tensor]:
    """Return the loss of a step, and the derivative of its mean by the value of each answer, ``[A]``."""
    values_A = inputs.values_A.detach().requires_grad_()
    with torch.enable_grad():
        result = preference_loss(config)(replace(inputs, values_A=values_A), read_preference_options(config))
        (derivatives_A,) = torch.autograd.grad(result.losses.mean(), values_A)
    return PreferenceLoss(result.losses.detach(), result.rewards_A.detach()), derivatives_A


def weigh_tokens(derivatives_A: Tensor, mask: Jagged) -> Jagged:
    """Return the weights of the tokens of answers with which the sum of ``weight * log-probability`` has the gradient
    of the loss: 0 outside ``mask``, the token column of bool that says where an answer is."""
    return mask.like((torch.repeat_interleave(derivatives_A, mask.lengths) * mask.values).float())


def explain_options(config: ScorerConfig) -> Mapping[str, Setting]:
    """Return the options of the loss with their values and where these come from, for a dry run."""
    options: Any = read_preference_options(config)
    source = declaration_of(preference_loss(config)).source
    return {
        field.name: Setting(
            getattr(options, field.name),
            "yours" if field.name in config.options else f"default of the loss {config.loss_name}: {source}",
        )
        for field in fields(options)
    }
