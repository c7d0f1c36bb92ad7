"""Tensors that stay where readers find them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from podium.backends.local.shared_memory import SegmentPool
from podium.backends.local.store import LocalStore
from podium.data import InPlace, MemoryStore, TensorRef, keep
from podium.data.store import CHECKS


def share(tensors: list[torch.Tensor], store: Any) -> list[TensorRef]:
    refs = keep(InPlace(tensors), store, "maker")
    assert isinstance(refs, list)
    return refs


def test_readers_see_what_is_written_and_the_tensors_stay_the_same_objects() -> None:
    store = LocalStore(SegmentPool())
    weight = torch.nn.Parameter(torch.rand(1000, 30))
    scalar, half = torch.tensor(2.0), torch.rand(70_000).to(torch.bfloat16)
    before = [tensor.detach().clone() for tensor in (weight, scalar, half)]
    refs = share([weight, scalar, half], store)
    assert all(torch.equal(ref.get(), tensor) for ref, tensor in zip(refs, before, strict=True))
    assert store.usage().nbytes == 0, "it is not what is kept by reference"
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.sum().backward()
    optimizer.step()
    assert torch.equal(refs[0][5:9].get(readonly=True), before[0][5:9] - 1)
    mine = refs[0].get()
    mine.zero_()
    assert torch.equal(weight, before[0] - 1), "what a reader writes stays its own"


def test_the_key_names_the_references_until_a_tensor_moves() -> None:
    store, tensors = LocalStore(SegmentPool()), [torch.rand(10), torch.rand(20)]
    live = InPlace(tensors)
    assert live.key == ""
    refs, key = live.share(store, "maker"), live.key
    assert key
    assert live.share(store, "maker") is refs
    tensors[1].data = torch.rand(20)
    assert live.key == ""
    again = live.share(store, "maker")
    assert live.key not in ("", key)
    assert again is not None
    assert torch.equal(again[1].get(), tensors[1])


def test_memory_is_held_by_the_tensor_and_by_its_references() -> None:
    segments = SegmentPool()
    tensor = torch.rand(100_000)
    live = InPlace([tensor])
    refs = live.share(LocalStore(segments), "maker")
    del live, refs
    gc.collect()
    used, _ = segments.usage()
    assert used >= tensor.nbytes, "a segment that is used again would be written over"
    part = tensor[:5]
    del tensor
    assert segments.usage()[0] == used
    del part
    gc.collect()
    assert segments.usage()[0] == 0


def test_where_it_cannot_be_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalStore(SegmentPool())
    tensor = torch.rand(10, 10)
    place = tensor.data_ptr()
    assert keep(InPlace([tensor]), MemoryStore(), "maker") is None
    assert keep(InPlace([tensor, tensor.t()]), local, "maker") is None
    assert keep(InPlace([tensor, torch.empty(0)]), local, "maker") is None
    monkeypatch.setenv(CHECKS, "1")
    assert keep(InPlace([tensor]), LocalStore(SegmentPool()), "maker") is None
    assert tensor.data_ptr() == place
