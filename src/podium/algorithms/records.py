"""What goes into an estimator or a loss and what comes out: plain records of tensors over a flat layout.

Legend: B rows (completions), N tokens over all rows, ``offsets_B1`` int64 ``[B + 1]`` (row i is the tokens
``offsets_B1[i]:offsets_B1[i + 1]``). Log-probabilities and entropies are in nats. An
estimator sees the whole batch of a step, a loss one micro-batch of whole rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from podium.algorithms.named import COLUMNS
from podium.algorithms.token_rows import ends_of_rows, row_sums, rows_of_tokens, wide
from podium.errors import DataError

__all__ = [
    "AdvantageInputs",
    "AdvantageOutputs",
    "LossInputs",
    "TokenLoss",
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
        truncated_B: bool ``[B]``, True where the completion was cut off at its greatest length. None: not recorded.
        parts_B: The parts of the reward by name, float ``[B]``; NaN where a completion's reward has no such part.
        data: Columns of the data by name, each a list ``[B]``: those that the estimator declares.
        old_logprobs_N, rollout_logprobs_N, ref_logprobs_N, entropy_N: Log-probabilities under the policy, the
            generator and the reference, and the policy's entropy, all before the update. None unless the estimator
            declares them as ``columns``.

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
    truncated_B: Tensor | None = None
    parts_B: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    data: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    old_logprobs_N: Tensor | None = None
    rollout_logprobs_N: Tensor | None = None
    ref_logprobs_N: Tensor | None = None
    entropy_N: Tensor | None = None

    def __post_init__(self) -> None:
        rows, tokens = len(self.offsets_B1) - 1, len(self.mask_N)
        if rows < 0 or int(self.offsets_B1[-1]) != tokens:
            raise DataError(f"AdvantageInputs.offsets_B1 must end at the {tokens} tokens of mask_N")
        if self.mask_N.dtype != torch.bool:
            raise DataError(f"AdvantageInputs.mask_N is {self.mask_N.dtype}; expected torch.bool")
        for names, length in (
            (("rewards_B", "group_B", "bootstrap_B", "truncated_B"), rows),
            (("mask_N", "token_rewards_N", "values_N", *(f"{name}_N" for name in COLUMNS)), tokens),
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
class LossInputs:
    """The tokens with loss of whole rows, as a loss sees them: those of one micro-batch.

    B rows have N tokens with loss between them; rows without any are left out. Here is a row of two tokens and one of
    a single token:

    >>> inputs = LossInputs(
    ...     offsets_B1=torch.tensor([0, 2, 3]), columns={"logprobs": torch.tensor([-1.0, -3.0, -5.0])}
    ... )
    >>> inputs.row_N.tolist(), inputs.row_means(inputs.logprobs_N).tolist()
    ([0, 0, 1], [-2.0, -5.0])

    Attributes:
        offsets_B1: int64 ``[B + 1]``; row i is the tokens ``offsets_B1[i]:offsets_B1[i + 1]``.
        columns: Values ``[N]`` by name. The properties below read them; reading one that is missing raises DataError.
        figures: What the loss's ``minibatch`` function returned for these tokens, ``[N]`` by name.
        step: Optimizer steps before this one, equal on all ranks: a seed for a loss that draws.
    """

    offsets_B1: Tensor
    columns: Mapping[str, Tensor]
    figures: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    step: int = 0

    @cached_property
    def row_N(self) -> Tensor:
        """Row of each token, int64 ``[N]``."""
        return rows_of_tokens(self.offsets_B1)

    @property
    def logprobs_N(self) -> Tensor:
        """Log-probabilities under the policy that is being trained, with their gradient."""
        return self._column("logprobs")

    @property
    def old_logprobs_N(self) -> Tensor:
        """Log-probabilities before the update. A batch that trains in one optimizer step has none: the policy is then
        unchanged since, and these are ``logprobs_N`` without gradient."""
        old_N = self.columns.get("old_logprobs")
        return self.logprobs_N.detach() if old_N is None else old_N

    @property
    def advantages_N(self) -> Tensor:
        """Advantages by the estimator."""
        return self._column("advantages")

    @property
    def rollout_logprobs_N(self) -> Tensor:
        """Log-probabilities under the distribution that the generator sampled from."""
        return self._column("rollout_logprobs")

    @property
    def ref_logprobs_N(self) -> Tensor:
        """Log-probabilities under the reference policy, which exists unless ``algorithm.kl_in = "none"``."""
        return self._column("ref_logprobs")

    @property
    def entropy_N(self) -> Tensor:
        """Entropy of the trained policy; has a gradient where ``algorithm.entropy_coef`` is set."""
        return self._column("entropy")

    @property
    def tokens_N(self) -> Tensor:
        """Token ids, int64."""
        return self._column("tokens")

    @property
    def values_N(self) -> Tensor:
        """Values by the critic that is being trained, with their gradient. Only the critic's loss has these."""
        return self._column("values")

    @property
    def old_values_N(self) -> Tensor:
        """Values before the update. Only the critic's loss has these."""
        return self._column("old_values")

    @property
    def returns_N(self) -> Tensor:
        """Targets of the values. Only the critic's loss has these."""
        return self._column("returns")

    def row_means(self, values_N: Tensor) -> Tensor:
        """Mean of each row's values, float ``[B]``; ``row_means(x)[row_N]`` gives each token its row's mean."""
        lengths_B = self.offsets_B1.diff()
        return row_sums(values_N, self.row_N, len(lengths_B)) / lengths_B.clamp(min=1)

    def _column(self, name: str) -> Tensor:
        if name not in self.columns:
            remedy = "; set algorithm.kl_in to 'loss' (kl_coef 0 only measures)" if name == "ref_logprobs" else ""
            raise DataError(f"the loss reads {name}_N, and this batch has no column {name!r}{remedy}")
        return self.columns[name]


@dataclass(frozen=True)
class TokenLoss:
    """A loss token by token, not aggregated: the caller sums ``weights_N * loss_N`` (see :mod:`.aggregation`).

    >>> loss = TokenLoss(torch.tensor([0.5, 1.5]), {"policy/clip_fraction": torch.tensor([0.0, 1.0])})
    >>> float((torch.tensor([0.5, 0.5]) * loss.loss_N).sum())
    1.0

    Attributes:
        loss_N: ``[N]``; carries the gradient.
        metrics: Reported as weighted means over the tokens, ``[N]`` by name, without gradient. All micro-batches have
            the same names.
        maxima: Reported as maxima over the tokens, likewise.
    """

    loss_N: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    maxima: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
