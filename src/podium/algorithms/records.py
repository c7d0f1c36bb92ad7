"""What estimators and losses are given and what they return: records of tensors over a flat layout.

Legend: B rows (completions), N tokens over all rows, ``offsets_B1`` int64 ``[B + 1]`` (row i is the tokens
``offsets_B1[i]:offsets_B1[i + 1]``). Log-probabilities and entropies are in nats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from podium.algorithms.declarations import COLUMNS
from podium.algorithms.token_rows import ends_of_rows, row_sums, rows_of_tokens, wide
from podium.data import fields
from podium.errors import DataError

_COMPUTED: Final = ("logprobs", "old_values", "router_balance", "at_teacher_top", "at_rollout_top")
_TAKEN: Final = {*_COMPUTED, *(value for name, value in vars(fields).items() if name.isupper())}


def is_own_column(name: str) -> bool:
    """Whether a token column of this name is not Podium's, so that a loss of the user's own may read it."""
    return name not in _TAKEN and not name.startswith((fields.PART, fields.DATA))


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """The whole batch of a step, as an advantage estimator sees it.

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

    A row is a completion, or everything that one agent said in a session. A row has one reward.

    Attributes:
        rewards_B: float ``[B]``, the score of each completion.
        group_B: int64 ``[B]``. Completions of one prompt share a number; the numbers and their order are free.
        mask_N: bool ``[N]``, True on the tokens that the policy chose. Gaps (the answers of a tool) are allowed.
        token_rewards_N: float ``[N]``, rewards besides ``rewards_B``, a KL penalty for example. Those outside the mask
            are ignored.
        turn_N: int64 ``[N]``, the turn of its row that chose each token, counted in the order of time; values outside
            the mask are ignored. None where each row is a single turn. An estimator of turns reads it.
        values_N: float ``[N]``, the critic's value before each token is seen. None without a critic.
        bootstrap_B: float ``[B]``, the critic's value after the last token, for rows that were cut off; 0 for rows
            that ended by themselves. None means 0 for all rows.
        truncated_B: bool ``[B]``, True where the completion was cut off at its greatest length. None where this is not
            recorded.
        baseline_B: float ``[B]``, the reward of a greedy completion of each row's prompt. None unless the estimator
            declares ``needs_greedy``.
        parts_B: float ``[B]`` by name: the parts of the reward; NaN where a completion's reward has no such part.
        data: A list ``[B]`` by name: the columns of the data that the estimator declares.
        old_logprobs_N, rollout_logprobs_N, ref_logprobs_N, entropy_N, squared_probs_N: Log-probabilities under the
            policy, the generator and the reference, the policy's entropy, and the sum of the squares of its
            probabilities over the vocabulary, all before the update. None unless the estimator declares them as
            ``columns``.

    Raises:
        DataError: The shape of a tensor does not fit the others; names the tensor.
    """

    rewards_B: Tensor
    group_B: Tensor
    mask_N: Tensor
    offsets_B1: Tensor
    token_rewards_N: Tensor | None = None
    turn_N: Tensor | None = None
    values_N: Tensor | None = None
    bootstrap_B: Tensor | None = None
    truncated_B: Tensor | None = None
    baseline_B: Tensor | None = None
    parts_B: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    data: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    old_logprobs_N: Tensor | None = None
    rollout_logprobs_N: Tensor | None = None
    ref_logprobs_N: Tensor | None = None
    entropy_N: Tensor | None = None
    squared_probs_N: Tensor | None = None

    def __post_init__(self) -> None:
        rows, tokens = len(self.offsets_B1) - 1, len(self.mask_N)
        if rows < 0 or int(self.offsets_B1[-1]) != tokens:
            raise DataError(f"AdvantageInputs.offsets_B1 must end at the {tokens} tokens of mask_N")
        if self.mask_N.dtype != torch.bool:
            raise DataError(f"AdvantageInputs.mask_N is {self.mask_N.dtype}; expected torch.bool")
        for names, length in (
            (("rewards_B", "group_B", "bootstrap_B", "truncated_B", "baseline_B"), rows),
            (("mask_N", "token_rewards_N", "turn_N", "values_N", *(f"{name}_N" for name in COLUMNS)), tokens),
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
        """The whole reward of each row, float ``[B]``: ``rewards_B`` plus the row's token rewards."""
        rewards_B = wide(self.rewards_B)
        if self.token_rewards_N is None:
            return rewards_B
        masked_N = torch.where(self.mask_N, wide(self.token_rewards_N), 0.0)
        return rewards_B + row_sums(masked_N, self.row_N, len(rewards_B))

    @cached_property
    def rewards_N(self) -> Tensor:
        """The same rewards by token, float ``[N]``: ``rewards_B`` counts at the row's last masked token."""
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
        columns: Further values ``[N]`` by names of your own, for a loss of your own, which finds those of the tokens
            with loss in ``inputs.columns``.
    """

    advantages_N: Tensor
    returns_N: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


class _Column:
    """An attribute ``NAME_N`` that reads ``columns["NAME"]``."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name.removesuffix("_N")

    def __get__(self, inputs: LossInputs, owner: type | None = None) -> Tensor:
        if self.name in inputs.columns:
            return inputs.columns[self.name]
        if self.name == "old_logprobs":
            return inputs.logprobs_N.detach()
        remedies = {
            "ref_logprobs": "; set algorithm.kl_in to 'loss' (with kl_coef 0 the KL is only measured)",
            "teacher_logprobs": "; declare it by @Declaration(needs_teacher=True)",
        }
        remedy = remedies.get(self.name, "")
        raise DataError(f"the loss reads {self.name}_N, but this batch has no column {self.name!r}{remedy}")


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
        columns: Values ``[N]`` by name. The attributes below read them; reading one that is missing raises DataError.
            Token columns of the batch that are not Podium's are here, too.
        figures: What the loss's ``minibatch`` function returned for these tokens, ``[N]`` by name.
        step: The number of optimizer steps before this one, equal on all ranks: a seed for a loss that draws.
    """

    offsets_B1: Tensor
    columns: Mapping[str, Tensor]
    figures: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    step: int = 0

    logprobs_N = _Column()
    """Log-probabilities under the policy that is being trained, with their gradient."""
    old_logprobs_N = _Column()
    """Log-probabilities before the update. A batch that trains in one optimizer step has none: the policy is unchanged
    since, and these are ``logprobs_N`` without gradient."""
    advantages_N = _Column()
    """Advantages by the estimator."""
    rollout_logprobs_N = _Column()
    """Log-probabilities under the distribution that the generator sampled from."""
    ref_logprobs_N = _Column()
    """Log-probabilities under the reference policy, which exists unless ``algorithm.kl_in = "none"``."""
    teacher_logprobs_N = _Column()
    """Log-probabilities under the teacher, for a loss that declares ``needs_teacher``."""
    entropy_N = _Column()
    """Entropy of the trained policy. It has a gradient where ``algorithm.entropy_coef`` is set."""
    tokens_N = _Column()
    """Token ids, int64."""
    values_N = _Column()
    """Values by the critic that is being trained, with their gradient. Only the critic's loss has these."""
    old_values_N = _Column()
    """Values before the update. Only the critic's loss has these."""
    returns_N = _Column()
    """Targets of the values. Only the critic's loss has these."""

    @cached_property
    def row_N(self) -> Tensor:
        """Row of each token, int64 ``[N]``."""
        return rows_of_tokens(self.offsets_B1)

    def row_means(self, values_N: Tensor) -> Tensor:
        """Mean of each row's values, float ``[B]``; ``row_means(x)[row_N]`` gives each token its row's mean."""
        lengths_B = self.offsets_B1.diff()
        return row_sums(values_N, self.row_N, len(lengths_B)) / lengths_B.clamp(min=1)


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token. The caller sums ``weights_N * loss_N``: see :mod:`.aggregation`.

    >>> loss = TokenLoss(torch.tensor([0.5, 1.5]), {"policy/clip_fraction": torch.tensor([0.0, 1.0])})
    >>> float((torch.tensor([0.5, 0.5]) * loss.loss_N).sum())
    1.0

    Attributes:
        loss_N: ``[N]``, with the gradient.
        metrics: ``[N]`` by name, without gradient, reported as weighted means over the tokens. All micro-batches have
            the same names.
        maxima: ``[N]`` by name, likewise, reported as maxima over the tokens.
    """

    loss_N: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    maxima: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    def add(self, other: TokenLoss, coef: float) -> TokenLoss:
        """Return the sum of this loss and ``coef`` times the other one, with the metrics of both as they are."""
        loss_N = self.loss_N + coef * other.loss_N
        return TokenLoss(loss_N, {**self.metrics, **other.metrics}, {**self.maxima, **other.maxima})
