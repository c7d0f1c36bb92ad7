"""What goes into an estimator or a loss and what comes out: plain records of tensors over a flat layout.

Legend: B rows (completions), N tokens over all rows, ``offsets_B1`` int64 ``[B + 1]`` (row i is the tokens
``offsets_B1[i]:offsets_B1[i + 1]``). Log-probabilities and entropies are in nats. A loss may be given any part of
the N tokens, one micro-batch for example: it looks at each token by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from podium.algorithms.segments import ends_of_rows, row_sums, rows_of_tokens, wide
from podium.errors import DataError

__all__ = [
    "AdvantageInputs",
    "AdvantageOutputs",
    "PolicyLossInputs",
    "SFTLossInputs",
    "TokenLoss",
    "ValueLossInputs",
]


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """One whole batch, as an advantage estimator sees it.

    Two prompts, two completions each. Row 2 has a prompt of one token and a completion of two:

    >>> inputs = AdvantageInputs(
    ...     rewards_B=torch.tensor([1.0, 0.0, 1.0, 1.0]),
    ...     group_B=torch.tensor([7, 7, 9, 9]),
    ...     mask_N=torch.tensor([False, True, False, True, False, True, True, False, True]),
    ...     offsets_B1=torch.tensor([0, 2, 4, 7, 9]),
    ... )
    >>> inputs.row_N.tolist()
    [0, 0, 1, 1, 2, 2, 2, 3, 3]
    >>> inputs.spread(inputs.row_rewards_B).tolist()
    [0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    >>> inputs.rewards_N.tolist()
    [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]

    Attributes:
        rewards_B: float ``[B]``, score of each completion.
        group_B: int64 ``[B]``, completions of one prompt share a number; the numbers and their order are free.
        mask_N: bool ``[N]``, True on the tokens that the policy chose. Gaps (the answers of a tool) are allowed.
        offsets_B1: int64 ``[B + 1]``.
        token_rewards_N: float ``[N]``, rewards besides ``rewards_B``, a KL penalty for example; outside the mask they
            are ignored. None: there are none.
        values_N: float ``[N]``, the critic's value before each token is seen. None: there is no critic.
        bootstrap_B: float ``[B]``, the critic's value after the last token, for rows that were cut off; 0 for rows
            that ended by themselves. None: 0 for all.

    Raises:
        DataError: a tensor whose shape does not fit the others, by name.
    """

    rewards_B: Tensor
    group_B: Tensor
    mask_N: Tensor
    offsets_B1: Tensor
    token_rewards_N: Tensor | None = None
    values_N: Tensor | None = None
    bootstrap_B: Tensor | None = None

    def __post_init__(self) -> None:
        rows, tokens = len(self.offsets_B1) - 1, len(self.mask_N)
        if rows < 0 or int(self.offsets_B1[-1]) != tokens:
            raise DataError(f"AdvantageInputs.offsets_B1 must end at the {tokens} tokens of mask_N")
        if self.mask_N.dtype != torch.bool:
            raise DataError(f"AdvantageInputs.mask_N is {self.mask_N.dtype}; expected torch.bool")
        for names, length in (
            (("rewards_B", "group_B", "bootstrap_B"), rows),
            (("mask_N", "token_rewards_N", "values_N"), tokens),
        ):
            for name in names:
                tensor: Tensor | None = getattr(self, name)
                if tensor is not None and tensor.shape != (length,):
                    raise DataError(f"AdvantageInputs.{name} has shape {list(tensor.shape)}; expected [{length}]")

    @cached_property
    def row_N(self) -> Tensor:
        """Row of each token, int64 ``[N]``."""
        return rows_of_tokens(self.offsets_B1)

    @cached_property
    def row_rewards_B(self) -> Tensor:
        """Everything a row was rewarded with, float ``[B]``: ``rewards_B`` and the row's token rewards."""
        rewards_B = wide(self.rewards_B)
        if self.token_rewards_N is None:
            return rewards_B
        masked_N = torch.where(self.mask_N, wide(self.token_rewards_N), 0.0)
        return rewards_B + row_sums(masked_N, self.row_N, len(rewards_B))

    @cached_property
    def rewards_N(self) -> Tensor:
        """The same rewards token by token, float ``[N]``: ``rewards_B`` falls due at a row's last masked token."""
        chosen_M = self.mask_N.nonzero().squeeze(1)
        row_M = self.row_N[chosen_M]
        last = ends_of_rows(row_M)
        rewards_N = torch.zeros_like(self.mask_N, dtype=wide(self.rewards_B).dtype)
        rewards_N[chosen_M[last]] = wide(self.rewards_B)[row_M[last]]
        if self.token_rewards_N is None:
            return rewards_N
        return rewards_N + torch.where(self.mask_N, wide(self.token_rewards_N), 0.0)

    def spread(self, values_B: Tensor) -> Tensor:
        """Each row's value at all its masked tokens, 0 elsewhere, ``[N]``."""
        return torch.where(self.mask_N, values_B[self.row_N], 0.0)


@dataclass(frozen=True, kw_only=True)
class AdvantageOutputs:
    """What an estimator returns.

    Attributes:
        advantages_N: float ``[N]``, 0 outside the mask.
        returns_N: float ``[N]``, targets of the critic; None from estimators that need no critic.
    """

    advantages_N: Tensor
    returns_N: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyLossInputs:
    """Tokens of a policy update, each ``[N]``.

    Attributes:
        logprobs_N: of the policy that is being trained; carries the gradient.
        advantages_N: from an estimator.
        old_logprobs_N: of the policy before the update. None: the policy has not changed since, as in the first and
            only optimizer step on a batch; the ratio is then 1, and its gradient that of the log-probability.
        rollout_logprobs_N: of the distribution that was sampled from. None: not recorded.
        ref_logprobs_N: of the reference policy. None: there is none.
        entropy_N: of the policy that is being trained; carries a gradient where an entropy bonus is asked for.
    """

    logprobs_N: Tensor
    advantages_N: Tensor
    old_logprobs_N: Tensor | None = None
    rollout_logprobs_N: Tensor | None = None
    ref_logprobs_N: Tensor | None = None
    entropy_N: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ValueLossInputs:
    """Tokens of a critic update, each ``[N]``.

    Attributes:
        values_N: of the critic that is being trained; carries the gradient.
        old_values_N: of the critic before the update.
        returns_N: targets.
    """

    values_N: Tensor
    old_values_N: Tensor
    returns_N: Tensor


@dataclass(frozen=True, kw_only=True)
class SFTLossInputs:
    """Tokens of a supervised update, each ``[N]``.

    Attributes:
        logprobs_N: of the target tokens; carries the gradient.
        entropy_N: of the model's distribution, to be reported. None: not computed.
    """

    logprobs_N: Tensor
    entropy_N: Tensor | None = None


@dataclass(frozen=True)
class TokenLoss:
    """A loss token by token, not aggregated: the caller sums ``weights_N * loss_N`` (see :mod:`.aggregation`).

    >>> loss = TokenLoss(torch.tensor([0.5, 1.5]), {"policy/clip_fraction": torch.tensor([0.0, 1.0])})
    >>> float((torch.tensor([0.5, 0.5]) * loss.loss_N).sum())
    1.0

    Attributes:
        loss_N: ``[N]``; carries the gradient.
        metrics: name -> ``[N]``, detached; to be reported as means over the tokens.
        maxima: name -> ``[N]``, detached; to be reported as maxima over the tokens.
    """

    loss_N: Tensor
    metrics: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
