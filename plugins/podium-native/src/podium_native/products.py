"""Products of rows with a matrix, whose bits do not depend on the number of rows.

BLAS chooses a kernel, and with it the order of a sum, by the numbers of rows, columns, terms and threads. Sixteen rows
are the measure. Another multiple of 16 is computed at once where that was tried on this machine and gave the bits of
sixteen rows at a time, and otherwise in the fewest blocks that gave them. (MKL on two threads: ``[64, 1536] @ [1536,
576]`` sums in another order than ``[16, 1536] @ [1536, 576]`` and ``[256, 1536] @ [1536, 576]`` do.)

That is so for float32 on the CPU. Rows of another number, dtype or device are computed at once.
"""

from itertools import count, repeat

import torch
from torch import Tensor

from podium_native.packing import WIDTHS, multiply_packed
from podium_native.parameters import Dense

__all__ = ["ROW_QUANTUM", "add_product", "multiply", "round_rows"]

ROW_QUANTUM = 16
_MOST_NARROW = 4  # where matrices are not packed, 5 to 15 rows take as long as 16
_MOST_ROWS = 256  # of one product, so that at most 16 numbers of rows are tried for each matrix

_verdicts: dict[tuple[object, ...], bool] = {}
"""Whether so many rows at once have the bits of sixteen at a time, by all that BLAS chooses its kernel by."""


def multiply(rows: Tensor, dense: Dense) -> Tensor:
    """Return ``rows [N, K] @ weight_t [K, M] + bias``."""
    if not dense.is_apart:
        return _compute(rows, dense, dense.bias)
    product = _multiply_apart(rows, dense)
    return product if dense.bias is None else product.add_(dense.bias)


def add_product(residual: Tensor, rows: Tensor, dense: Dense) -> Tensor:
    """Return ``residual [N, M] + rows [N, K] @ weight_t [K, M] + bias``, by one product where there is no bias, unless
    the matrix is one that can be packed."""
    if dense.bias is not None or dense.is_apart:
        return residual + multiply(rows, dense)
    return _compute(rows, dense, residual)


def round_rows(rows: int, *, is_packed: bool, is_exact: bool) -> int:
    """Return how many rows are computed for ``rows`` of them: where ``is_exact``, with the bits of sixteen."""
    if rows <= 1 and (is_packed or not is_exact):
        return rows
    if is_packed and rows <= ROW_QUANTUM:
        return next(width for width in WIDTHS if width >= rows)
    if rows <= _MOST_NARROW and not is_exact:
        return rows
    return -(-rows // ROW_QUANTUM) * ROW_QUANTUM


def _multiply_apart(rows: Tensor, dense: Dense) -> Tensor:
    if dense.packed and len(rows) <= ROW_QUANTUM:
        return multiply_packed(rows, dense.packed)
    return _compute(rows, dense, None)


def _compute(rows: Tensor, dense: Dense, addend: Tensor | None) -> Tensor:
    blocks = dense.blocks.get(len(rows))
    if blocks is None:
        blocks = dense.blocks[len(rows)] = _find_blocks(rows, dense.weight_t, addend)
    return _in_blocks(rows, dense.weight_t, addend, blocks)


def _in_blocks(rows: Tensor, weight_t: Tensor, addend: Tensor | None, blocks: tuple[int, ...]) -> Tensor:
    if not blocks:
        return torch.mm(rows, weight_t) if addend is None else torch.addmm(addend, rows, weight_t)
    result = rows.new_empty(len(rows), weight_t.shape[1])
    addends = repeat(addend) if addend is None or addend.dim() == 1 else iter(addend.split(blocks))
    for block, out in zip(rows.split(blocks), result.split(blocks), strict=True):
        block_addend = next(addends)
        if block_addend is None:
            torch.mm(block, weight_t, out=out)
        else:
            torch.addmm(block_addend, block, weight_t, out=out)
    return result


def _find_blocks(rows: Tensor, weight_t: Tensor, addend: Tensor | None) -> tuple[int, ...]:
    """Return how many of ``rows`` are computed at a time; () for all of them at once."""
    number = len(rows)
    if number <= ROW_QUANTUM or number % ROW_QUANTUM or rows.device.type != "cpu" or rows.dtype != torch.float32:
        return ()
    for parts in count(-(-number // _MOST_ROWS)):
        quanta, rest = divmod(number // ROW_QUANTUM, parts)
        blocks = tuple((quanta + (part < rest)) * ROW_QUANTUM for part in range(parts))
        if all(_has_the_bits(block, weight_t, addend) for block in {*blocks}):
            return () if parts == 1 else blocks
    raise AssertionError("sixteen rows at a time have the bits of sixteen rows at a time")


def _has_the_bits(number: int, weight_t: Tensor, addend: Tensor | None) -> bool:
    if number == ROW_QUANTUM:
        return True
    sizes, strides = weight_t.shape, weight_t.stride()
    key = (number, *sizes, *strides, 0 if addend is None else addend.dim(), torch.get_num_threads())
    if (verdict := _verdicts.get(key)) is None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.rand(number, sizes[0], generator=generator) - 0.5
        if addend is not None and addend.dim() == 2:
            addend = torch.rand(number, sizes[1], generator=generator) - 0.5
        at_once = _in_blocks(rows, weight_t, addend, ())
        if not at_once.isfinite().all():
            return True  # broken weights say nothing, and are refused elsewhere
        sixteen_at_a_time = _in_blocks(rows, weight_t, addend, (ROW_QUANTUM,) * (number // ROW_QUANTUM))
        verdict = _verdicts[key] = torch.equal(at_once, sixteen_at_a_time)
    return verdict
