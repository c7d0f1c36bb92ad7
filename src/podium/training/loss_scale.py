"""The scale of a loss whose gradients pass through float16.

A float16 number below 6e-8 is 0, and one above 65,504 is infinite. The weight of a token is one in a million where a
step has a million tokens, so that most of its gradient would be 0.
"""

from typing import Final

import torch
from torch import Tensor

__all__ = ["LossScale"]

_FIRST: Final = 2.0**16
_LARGEST: Final = 2.0**24
_GROW_EVERY: Final = 50  # steps; a scale that proves too large costs one more pass over the minibatch
_LOWER_BY: Final = 4.0


class LossScale:
    """The factor of the loss in the backward pass, by which the gradients are divided before anything reads them.

    Dynamic loss scaling: Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740, section 3.2. Unlike
    there, a step whose gradients overflow is not skipped: its backward pass is made again with a lower scale, because a
    minibatch of completions costs more than a pass over it. All ranks see the same norm, so that they agree.

    Args:
        precision: The data type of matrix products. The scale of any other type than float16 is 1 and stays so.

    Attributes:
        value: A power of two.
        steps: The number of steps since the value last changed.
    """

    def __init__(self, precision: torch.dtype) -> None:
        self.is_used = precision == torch.float16
        self.value = _FIRST if self.is_used else 1.0
        self.steps = 0

    def lower(self) -> bool:
        """Lower the scale, because gradients were not finite. Return whether there is a lower one."""
        if self.value == 1.0:
            return False
        self.value, self.steps = max(1.0, self.value / _LOWER_BY), 0
        return True

    def count_step(self) -> None:
        """Count a step with finite gradients, and double the scale after many of them."""
        if not self.is_used:
            return
        self.steps += 1
        if self.steps == _GROW_EVERY:
            self.value, self.steps = min(_LARGEST, 2.0 * self.value), 0

    @property
    def state(self) -> Tensor:
        """Value and number of steps, float64 ``[2]``, for a checkpoint."""
        return torch.tensor([self.value, self.steps], dtype=torch.float64)

    def restore(self, state: Tensor) -> None:
        """Continue from a ``state``."""
        value, steps = state.tolist()
        self.value, self.steps = value, int(steps)
