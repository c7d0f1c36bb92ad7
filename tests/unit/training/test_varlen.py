"""torch's kernel for packed rows is called as each version's signature wants it.

The stubs compute what the kernels compute, row by row. They refuse what a kernel of their version refuses.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from podium.training.varlen import Bounds, _attend_row, _flash

LENGTHS = (5, 1, 12)


def _rows(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scale: float | None, window: int | None) -> Tensor:
    assert q.shape[1] == k.shape[1], "the kernel has as many heads of key as of query"
    parts: list[Tensor] = []
    for row in zip(*(states.split(offsets.diff().tolist()) for states in (q, k, v)), strict=True):
        query, key, value = (states.transpose(0, 1) for states in row)
        distance = torch.arange(len(row[0]))[:, None] - torch.arange(len(row[0]))[None, :]
        mask = (distance >= 0) & (distance < (window or len(row[0])))
        parts.append(F.scaled_dot_product_attention(query, key, value, mask, scale=scale).transpose(0, 1))
    return torch.cat(parts)


def torch_2_10(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False, return_aux: object = None,
) -> Tensor:  # fmt: skip
    assert is_causal
    return _rows(query, key, value, cu_seq_q, None, None)


def torch_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, return_aux: object = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    left, right = window_size
    assert right == 0, "rows are causal"
    return _rows(query, key, value, cu_seq_q, scale, None if left < 0 else left + 1)


def torch_2_12(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, return_aux: object = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert enable_gqa == (query.shape[1] != key.shape[1])
    times = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(times, dim=1) for states in (key, value))
    return torch_2_11(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size
    )  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize("kernel", [torch_2_10, torch_2_11, torch_2_12])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("window", [None, 4, 64])
def test_each_signature_attends_as_each_row_alone(
    kernel: Callable[..., object], kv_heads: int, scaling: float | None, window: int | None
) -> None:
    torch.manual_seed(0)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    q, k, v = (torch.randn(1, heads, sum(LENGTHS), 8) for heads in (4, kv_heads, kv_heads))
    out = _flash(kernel, q, k, v, Bounds(offsets, offsets, max(LENGTHS), max(LENGTHS)), scaling, window)
    if kernel is torch_2_10 and window == 4:
        assert out is None, "it has no windows, so that rows go one by one"
        return
    rows = zip(*(states.split(LENGTHS, dim=2) for states in (q, k, v)), strict=True)
    alone = torch.cat(
        [_attend_row(one, its_key, its_value, 0.0, scaling, window) for one, its_key, its_value in rows], dim=2
    )[0].transpose(0, 1)
    assert out is not None
    assert torch.allclose(out, alone, atol=1e-6)
