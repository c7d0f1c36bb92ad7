"""The advantages of a batch by the configured estimator, and the checks of what the estimator returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podium.algorithms.named import resolve_advantage
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.errors import DataError

if TYPE_CHECKING:
    from podium.algorithms.config import AlgorithmConfig

__all__ = ["compute_advantages"]


def compute_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """Run the estimator that ``config.advantage`` names, and check what it returns.

    Raises:
        ConfigError: The estimator cannot be found.
        DataError: It returned something else than finite ``[N]`` tensors that are 0 outside the mask.
    """
    outputs = resolve_advantage(config.advantage)(inputs, config)
    _check_outputs(outputs, inputs, f"advantage estimator {config.advantage!r}")
    return outputs


def _check_outputs(outputs: object, inputs: AdvantageInputs, who: str) -> None:
    if not isinstance(outputs, AdvantageOutputs):
        raise DataError(f"{who} returned {type(outputs).__name__}; expected AdvantageOutputs")
    columns = {"advantages_N": outputs.advantages_N}
    if outputs.returns_N is not None:
        columns["returns_N"] = outputs.returns_N
    for name, values_N in columns.items():
        shape = list(values_N.shape)
        if shape != [len(inputs.mask_N)]:
            raise DataError(
                f"{who} returned {name} of shape {shape}; expected one value a token, [{len(inputs.mask_N)}]"
            )
        if not bool(values_N.isfinite().all()):
            row = int(inputs.row_N[~values_N.isfinite()][0])
            raise DataError(f"{who} returned {name} that are not finite, first in row {row}: look at that row's reward")
        if bool((values_N[~inputs.mask_N] != 0).any()):
            raise DataError(
                f"{who} returned {name} that are not 0 outside mask_N; inputs.spread(values_B) sees to that"
            )
