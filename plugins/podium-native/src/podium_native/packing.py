"""Products of few rows, which take as long as reading the matrix, with the bits of sixteen rows.

    rows     1 to 16 rows of SmolLM2-135M's matrices, in ms, on one thread (two)
             1          4          8          16
    plain    23 (11)    41 (19)    67 (27)    60 (30)      the matrix lies as the parameter does
    packed   22 (11)    25 (12)    28 (14)    49 (19)      the matrix lies in the order in which BLAS reads it

A packed matrix is a copy, made anew for each version of the weights: it takes as much memory, and as long as about ten
products. The number of rows for which a matrix is packed changes neither its size nor, beyond the first row, the order
of sums, so that one copy serves 2 to 16 rows.

BLAS cuts the terms of a long sum into blocks. MKL cuts plain matrices after each 384 terms, and packed ones into equal
blocks, so that a matrix is packed in two parts where that gives other bits. What is tried, and compared with the
product of sixteen rows on this machine, is kept if every bit is the same; otherwise the matrix is not packed.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from podium.devices import free_memory_bytes, return_free_blocks
from podium_native.parameters import Dense, Packed

__all__ = ["WIDTHS", "can_pack", "is_worth_packing", "most_packed_bytes", "multiply_packed", "pack", "unpack"]

WIDTHS = (2, 4, 8, 12, 16)  # numbers of rows that are tried
_TERMS_AT_ONCE = 384
_HINTS = (16, 1)  # numbers of rows that MKL packs for: the two have other blocks where it runs on several threads
_LEAST_BYTES = 8 << 20  # smaller models are bound by the cost of starting an operation
_LEAST_STEPS = 24  # packing takes as long as about ten steps, and a completion may end before its length
_LEAST_FREE = 4  # times the size of the matrices is free memory

_ways: dict[tuple[object, ...], tuple[tuple[int, ...], int] | None] = {}
"""Where a matrix is cut and the number of rows that it is packed for, by its sizes and the number of threads; None
where no way gives the bits of sixteen rows."""


def can_pack(matrices: Sequence[Dense]) -> bool:
    """Return whether BLAS can pack matrices like these here, and products of few rows would be faster for it."""
    kinds = {(dense.weight_t.dtype, dense.weight_t.device.type) for dense in matrices}
    nbytes = sum(dense.weight_t.nbytes for dense in matrices)
    return kinds == {(torch.float32, "cpu")} and nbytes >= _LEAST_BYTES and torch.backends.mkl.is_available()


def is_worth_packing(lanes: int, steps: int) -> bool:
    """Return whether so many lanes have so many steps before them that packing is worth its time."""
    return 0 < lanes <= max(WIDTHS) and steps >= _LEAST_STEPS


def most_packed_bytes(nbytes: int, new_tokens: int) -> int:
    """Return the memory in bytes that packing takes of float32 matrices of ``nbytes`` in all on a CPU.

    It is 0 where completions of ``new_tokens`` tokens are too short for it, or the matrices too small.
    """
    packs = new_tokens >= _LEAST_STEPS and nbytes >= _LEAST_BYTES and torch.backends.mkl.is_available()
    return nbytes if packs else 0


def pack(matrices: Sequence[Dense]) -> bool:
    """Pack all of ``matrices``. Return whether products of any of ``WIDTHS`` rows have the bits of sixteen rows.

    If not, or if memory is short, none stays packed.
    """
    if not can_pack(matrices):
        return False
    nbytes = sum(dense.weight_t.nbytes for dense in matrices)
    if _LEAST_FREE * nbytes > free_memory_bytes(torch.device("cpu")):
        return False
    for dense in matrices:
        if not dense.packed and not _pack_one(dense):
            unpack(matrices)
            return False
    return True


def unpack(matrices: Sequence[Dense]) -> None:
    """Give back the memory of packed matrices to the system.

    malloc would keep it in holes, into which the packed matrices of the next version do not fit: aligned blocks ask for
    more than they take. With SmolLM2-135M a process grew by 3.5 times the matrices within ten versions.
    """
    if any(dense.packed for dense in matrices):
        for dense in matrices:
            dense.packed = ()
        return_free_blocks(torch.device("cpu"))


def multiply_packed(rows: Tensor, parts: Sequence[Packed]) -> Tensor:
    """Return ``rows [N, K] @ weight_t [K, M]``, N at most 16."""
    number = len(rows)
    if number == 1:  # for a single row BLAS has another order of sums
        return multiply_packed(rows.expand(2, -1), parts)[:1]
    products: Any = torch.ops.mkl._mkl_linear  # typed as a packet of overloads
    first, *others = parts
    if not others:
        return products(rows, first.matrix, first.shape, None, number)
    result: Tensor = products(rows[:, : first.stop].contiguous(), first.matrix, first.shape, None, number)
    for part in others:
        result += products(rows[:, part.start : part.stop].contiguous(), part.matrix, part.shape, None, number)
    return result


def _pack_one(dense: Dense) -> bool:
    weight_t = dense.weight_t
    key = (*weight_t.shape, *weight_t.stride(), torch.get_num_threads())
    if key in _ways:
        if (way := _ways[key]) is not None:
            dense.packed = _cut_and_pack(weight_t, *way)
        return way is not None
    terms = len(weight_t)
    whole, multiple = (terms,), terms // _TERMS_AT_ONCE * _TERMS_AT_ONCE
    all_cuts = [whole, (multiple, terms)] if 0 < multiple < terms else [whole]
    rows = torch.rand(max(WIDTHS), terms, generator=torch.Generator().manual_seed(0)) - 0.5
    expected = torch.mm(rows, weight_t)
    for cuts in all_cuts:
        for hint in _HINTS:
            parts = _cut_and_pack(weight_t, cuts, hint)
            if all(torch.equal(multiply_packed(rows[:width], parts), expected[:width]) for width in WIDTHS):
                _ways[key], dense.packed = (cuts, hint), parts
                return True
    if expected.isfinite().all():  # broken weights say nothing, and are refused elsewhere
        _ways[key] = None
    return False


def _cut_and_pack(weight_t: Tensor, cuts: Sequence[int], hint: int) -> tuple[Packed, ...]:
    weight: Tensor = weight_t.t()
    return tuple(
        Packed(
            *(start, stop, torch.ops.mkl._mkl_reorder_linear_weight(weight[:, start:stop].contiguous(), hint)),
            weight.new_empty(1).expand(len(weight), stop - start),
        )
        for start, stop in pairwise((0, *cuts))
    )
