"""Joined results land in memory that was used before, and never in memory that still is."""

from __future__ import annotations

import gc

import torch

from podium.data import concat_tensors, copy_tensor

LARGE = 1 << 20  # float32 elements: 4 MiB, far above what is left to the allocator


def test_it_is_torch_cat() -> None:
    for parts in (
        [torch.arange(3), torch.arange(4)],
        [torch.ones(2, 3), torch.zeros(0, 3), torch.ones(1, 3)],
        [torch.rand(LARGE), torch.rand(LARGE)],
        [torch.rand(LARGE, 2).to(torch.bfloat16), torch.rand(5, 2).to(torch.bfloat16)],
        [torch.ones(LARGE), torch.ones(LARGE, dtype=torch.float64)],
    ):
        joined, plain = concat_tensors(parts), torch.cat(parts)
        assert joined.dtype == plain.dtype
        assert torch.equal(joined, plain)


def test_gradients_flow_through_a_large_join() -> None:
    left = torch.ones(LARGE, requires_grad=True)
    concat_tensors([left, torch.ones(LARGE)]).sum().backward()
    assert left.grad is not None


def test_memory_is_used_again_only_when_nobody_holds_it() -> None:
    def join(value: float) -> torch.Tensor:
        return concat_tensors([torch.full((LARGE,), value)] * 2)

    first = join(1.0)
    view, array = first[:10], first.numpy()[-5:]
    place = first.data_ptr()
    del first
    gc.collect()
    second = join(2.0)
    assert second.data_ptr() != place, "a view of it lives"
    assert view.tolist() == [1.0] * 10
    assert array.tolist() == [1.0] * 5
    del view, array
    gc.collect()
    third = join(3.0)
    assert third.data_ptr() == place
    assert float(second[0]) == 2.0


def test_a_copy_is_torchs_whatever_the_tensors_are() -> None:
    wide = torch.rand(LARGE, 2)
    for target, source in (
        (torch.empty(LARGE), torch.rand(LARGE)),
        (torch.empty(LARGE, dtype=torch.bfloat16), torch.rand(LARGE)),
        (torch.empty(LARGE), wide[:, 0]),
        (torch.empty(2 * LARGE)[::2], torch.rand(LARGE)),
        (torch.empty(LARGE, 3), torch.rand(3)),
        (torch.empty(()), torch.tensor(3.0)),
        (torch.nn.Parameter(torch.empty(LARGE)), torch.rand(LARGE, requires_grad=True)),
    ):
        with torch.no_grad():
            copy_tensor(target, source)
            assert torch.equal(target, source.to(target.dtype).expand_as(target))
