"""The weight of each token's loss under all corrections that a configuration names."""

from typing import cast

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import LossInputs
from podium.algorithms.registry import resolve_correction
from podium.algorithms.token_rows import wide
from podium.errors import DataError

__all__ = ["correction_weights"]


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
            weights_N = cast("object", resolve_correction(name)(inputs, config))
            if not isinstance(weights_N, Tensor) or weights_N.shape != product_N.shape:
                kind = f"shape {list(weights_N.shape)}" if isinstance(weights_N, Tensor) else type(weights_N).__name__
                raise DataError(
                    f"correction {name!r} returned {kind}; expected a tensor of one weight a token, "
                    f"{list(product_N.shape)}"
                )
            weights_N = wide(weights_N)
            if not bool((weights_N.isfinite() & (weights_N >= 0)).all()):
                raise DataError(f"correction {name!r} returned weights that are not finite or below 0")
            product_N = product_N * weights_N
    return product_N
