"""Run the estimator that the configuration names, and check what it returns."""

from typing import cast

from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import advantage_declaration
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.registry import resolve_advantage
from podium.errors import DataError

__all__ = ["compute_advantages"]


def compute_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """Run the estimator that ``config.advantage`` names, and check what it returns.

    Raises:
        ConfigError: The estimator cannot be found.
        DataError: The estimator returned something other than finite ``[N]`` tensors that are 0 outside the mask.
    """
    outputs = cast("object", resolve_advantage(config.advantage)(inputs, config))
    who = f"advantage estimator {config.advantage!r}"
    if not isinstance(outputs, AdvantageOutputs):
        raise DataError(f"{who} returned {type(outputs).__name__}; expected AdvantageOutputs")
    if outputs.returns_N is None and advantage_declaration(config.advantage).needs_values:
        raise DataError(f"{who} returned no returns_N, which are the critic's targets")
    columns: dict[str, object] = {"advantages_N": outputs.advantages_N, "returns_N": outputs.returns_N}
    for name, values_N in columns.items():
        if values_N is None and name == "returns_N":
            continue
        tokens = len(inputs.mask_N)
        if not isinstance(values_N, Tensor):
            raise DataError(
                f"{who} returned {name} as {type(values_N).__name__}; expected a tensor of one value a token"
            )
        if values_N.shape != (tokens,):
            raise DataError(
                f"{who} returned {name} of shape {list(values_N.shape)}; expected one value a token, [{tokens}]"
            )
        if not bool(values_N.isfinite().all()):
            row = int(inputs.row_N[~values_N.isfinite()][0])
            raise DataError(
                f"{who} returned {name} with values that are not finite, first in row {row}: check the "
                "reward of that row"
            )
        if bool((values_N[~inputs.mask_N] != 0).any()):
            raise DataError(
                f"{who} returned {name} with values that are not 0 outside mask_N; inputs.spread(values_B) makes a "
                "tensor that is 0 there"
            )
    return outputs
