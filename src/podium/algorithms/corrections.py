"""The corrections for tokens that another policy drew: ``(LossInputs, AlgorithmConfig) -> Tensor``, a weight of each
token's loss, ``[N]``."""

from typing import cast

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import CORRECTIONS, TruncateOptions
from podium.algorithms.kl import bounded_exp
from podium.algorithms.records import LossInputs
from podium.algorithms.token_rows import wide
from podium.errors import DataError


def correction_weights(inputs: LossInputs, config: AlgorithmConfig) -> Tensor | None:
    """The product of the weights of ``config.corrections``, ``[N]``, without gradient; None without corrections.

    Raises:
        ConfigError: A correction cannot be found.
        DataError: A column is missing, or a correction did not return one finite weight of at least 0 a token.
    """
    if not config.corrections:
        return None
    product_N = torch.ones_like(wide(inputs.logprobs_N.detach()))
    with torch.no_grad():
        for name in config.corrections:
            weights_N = cast("object", CORRECTIONS.load(name)(inputs, config))
            if not isinstance(weights_N, Tensor) or weights_N.shape != product_N.shape:
                kind = f"shape {list(weights_N.shape)}" if isinstance(weights_N, Tensor) else type(weights_N).__name__
                raise DataError(
                    f"correction {name!r} returned {kind}; expected a tensor of one weight a token, "
                    f"{list(product_N.shape)}"
                )
            weights_N = wide(weights_N)
            if not bool((weights_N.isfinite() & (weights_N >= 0)).all()):
                raise DataError(f"correction {name!r} returned weights that are negative or not finite")
            product_N = product_N * weights_N
    return product_N


def generator_log_ratio(inputs: LossInputs) -> Tensor:
    """``old_logprobs - rollout_logprobs``, ``[N]``, without gradient."""
    return (wide(inputs.old_logprobs_N) - wide(inputs.rollout_logprobs_N)).detach()


@CORRECTIONS.own["truncate"]
def truncate(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """``min(exp(old - rollout), weight_cap)``, ``[N]``: truncated importance weights.

    Generator and trainer compute different log-probabilities, because their kernels, precision or version of the
    weights differ. Multiplied into the loss, these weights make samples of the generator stand for samples of the old
    policy. The cap bounds their variance at the price of a small bias: Ionides 2008; for token policies Espeholt et al.
    2018, "IMPALA", arXiv:1802.01561, section 4.1; between a rollout engine and its trainer Yao et al. 2025, "On the
    Rollout-Training Mismatch in Modern RL Systems".
    """
    return bounded_exp(generator_log_ratio(inputs)).clamp(max=config.read_options(TruncateOptions).weight_cap)


@CORRECTIONS.own["bypass"]
def bypass(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """1, ``[N]``. Its declaration makes the loss read the generator's log-probabilities as ``old_logprobs_N``.

    The ratio then corrects for both the generator's mismatch and the updates of the step, within the bounds of the
    loss, and no pass computes the old log-probabilities: ``bypass_mode`` of verl.
    """
    return torch.ones_like(wide(inputs.logprobs_N.detach()))
