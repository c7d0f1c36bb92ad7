"""One loss from the losses of tokens: their weights, computed once over the whole batch of an optimizer step.

    loss = sum over ranks, micro-batches and tokens of weights_N * loss_N

Nothing is divided afterwards, so the loss and its gradient do not depend on how rows are spread over ranks and
micro-batches. Gradients of ranks are summed, not averaged.

- ``token-mean``: each token counts the same. Yu et al. 2025, "DAPO", arXiv:2503.14476, section 3.3.
- ``sequence-mean``: each row counts the same; its tokens share its weight. Shao et al. 2024, arXiv:2402.03300, eq. 3.
  The rows of a trajectory, such as all that an agent said in a session, count as one.
- ``sequence-sum-constant``: the sum over a row's tokens is divided by a constant, the longest completion that could
  have been sampled, so that a token of a long row counts no less. Liu et al. 2025, "Dr. GRPO", arXiv:2503.20783,
  section 3.2.
"""

from typing import get_args

import torch
from torch import Tensor

from podium.algorithms.config import Aggregation
from podium.algorithms.token_rows import row_sums, rows_of_tokens
from podium.errors import ConfigError


def loss_weights(
    mask_N: Tensor,
    offsets_B1: Tensor,
    mode: Aggregation = "token-mean",
    *,
    constant: float | None = None,
    tokens: Tensor | None = None,
    rows: Tensor | None = None,
    trajectory_tokens_B: Tensor | None = None,
) -> Tensor:
    """Weight of each token, float32 ``[N]``, 0 outside the mask.

    Rows without a token in the mask do not count as rows. The weights of the two means sum to 1.

    >>> mask_N, offsets_B1 = torch.tensor([False, True, False, True, True, True]), torch.tensor([0, 2, 6])
    >>> loss_weights(mask_N, offsets_B1, "token-mean").tolist()
    [0.0, 0.25, 0.0, 0.25, 0.25, 0.25]
    >>> loss_weights(mask_N, offsets_B1, "sequence-sum-constant", constant=8).tolist()
    [0.0, 0.0625, 0.0, 0.0625, 0.0625, 0.0625]

    Args:
        mask_N: bool ``[N]``, True on tokens that carry loss.
        offsets_B1: int64 ``[B + 1]``; row i is the tokens ``offsets_B1[i]:offsets_B1[i + 1]``.
        mode: See the module.
        constant: The divisor of ``sequence-sum-constant``, in tokens; ``sampling.max_new_tokens`` for example.
        tokens: The number of masked tokens in the whole batch. Give this scalar and the next one where ``mask_N`` has
            only some of the batch's rows.
        rows: The number of rows of the whole batch that have a masked token. A row that is a part of a trajectory
            counts as its share of the trajectory's tokens.
        trajectory_tokens_B: ``[B]``, the number of masked tokens of the trajectory that each row is part of, whether
            its other rows are here or not. None where each row is a trajectory.

    Raises:
        ConfigError: The mode is unknown, or ``sequence-sum-constant`` has no positive constant.
    """
    if mode not in get_args(Aggregation):
        raise ConfigError(f"algorithm.aggregation = {mode!r}: expected one of {', '.join(get_args(Aggregation))}")
    counted_N = mask_N.float()
    if mode == "token-mean":
        return counted_N / (counted_N.sum() if tokens is None else tokens).clamp(min=1)
    row_N = rows_of_tokens(offsets_B1)
    tokens_B = row_sums(counted_N, row_N, len(offsets_B1) - 1)
    whole_B = (tokens_B if trajectory_tokens_B is None else trajectory_tokens_B.to(tokens_B)).clamp(min=1)
    rows = (tokens_B / whole_B).sum() if rows is None else rows.to(tokens_B)
    rows = rows.where(rows > 0, 1.0)
    if mode == "sequence-mean":
        return counted_N / (whole_B * rows)[row_N]
    if constant is None or not constant > 0:
        raise ConfigError(
            f"algorithm.aggregation = {mode!r} divides by a constant, which is {constant!r}: pass loss_weights a "
            "positive constant, such as sampling.max_new_tokens"
        )
    return counted_N / (torch.as_tensor(constant, dtype=counted_N.dtype, device=counted_N.device) * rows)
