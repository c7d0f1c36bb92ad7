"""What a CUDA graph does, on a CPU: the operations of one step are noted, and run again over the same memory.

As a graph, a tape knows addresses and no Python. It refuses what a graph cannot record: a number that is read from the
device, a shape that depends on values, and data that come from Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from podium_native.graphs import Step, StepResult

aten = torch.ops.aten
REFUSED = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.lift_fresh, aten._unique2, aten.equal}


class Tape(TorchDispatchMode):
    """The operations of a step in their order, each with its arguments and what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in REFUSED:
            raise RuntimeError(f"a graph cannot record {func}")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, [*_tensors(result)]))
        return result


def record(step: Step, device: torch.device) -> Step:
    """Record a step; the results of all later runs are in the same tensors."""
    del device
    tape = Tape()
    with tape:
        results = step()

    def replay() -> StepResult:
        for func, args, kwargs, before in tape.calls:
            for old, new in zip(before, _tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():  # else a view, or an operation in place
                    old.copy_(new)
        return results

    return replay


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Sequence):
        for one in cast("Sequence[Any]", result):
            yield from _tensors(one)
