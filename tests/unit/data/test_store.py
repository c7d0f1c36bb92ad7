"""Stores: what they hold, what they refuse, and what a check finds."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from podium.backends.local.shared_memory import SegmentPool
from podium.backends.local.store import LocalStore
from podium.data import MemoryStore, PlainBlock, TensorStore, keep, lay_out
from podium.data.store import CHECKS, _read_allowed_bytes
from podium.errors import DataError, StoreFullError

MIB = 1 << 20


def local(limit: int | None = None) -> TensorStore:
    return LocalStore(SegmentPool(), limit)


def shared(limit: int | None = None) -> TensorStore:
    return MemoryStore(limit, shared=True)


@pytest.mark.parametrize("make", [local, shared])
def test_what_is_put_can_be_read_and_ends_with_its_last_reference(make: Callable[..., TensorStore]) -> None:
    store = make()
    buffers = [np.full(size, size % 256, dtype=np.uint8) for size in (1, 100, 3 * MIB)]
    block = store.put(buffers, "maker of rank 0")
    offsets, nbytes = lay_out(buffers)
    assert block.info == (nbytes, "maker of rank 0", None)
    memory = block.read()
    for buffer, at in zip(buffers, offsets, strict=True):
        assert np.array_equal(memory[at : at + buffer.nbytes], buffer)
    used, limit, holders = store.usage()
    assert nbytes <= used < limit
    assert holders[0][0] == "maker of rank 0"
    del block, memory
    gc.collect()
    assert store.usage().nbytes == 0


@pytest.mark.parametrize("make", [local, shared])
def test_a_full_store_names_who_holds_most(make: Callable[..., TensorStore]) -> None:
    store = make(10 * MIB)
    small, large = keep(torch.ones(MIB // 4), store, "small"), keep(torch.ones(2 * MIB), store, "large")
    with pytest.raises(
        StoreFullError, match=r"no room for 4 MiB made by next: .* 9 MiB of at most 10 MiB.*held by: 8 MiB"
    ) as error:
        keep(torch.ones(MIB), store, "next")
    assert str(error.value).index("made by large") < str(error.value).index("made by small")
    assert "store_bytes" in str(error.value)
    del large
    gc.collect()
    assert torch.equal(keep(torch.ones(MIB), store, "next").get(), torch.ones(MIB))
    assert torch.equal(small.get(), torch.ones(MIB // 4))


def test_a_limit_of_nothing_is_one() -> None:
    with pytest.raises(StoreFullError, match="at most 0 MiB"):
        keep(torch.ones(MIB), shared(0), "maker")


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    own, job = tmp_path / "own", tmp_path / "cgroup" / "jobs" / "7"
    own.write_text("0::/jobs/7\n")
    job.mkdir(parents=True)
    (job / "memory.max").write_text("max\n")
    (job.parent / "memory.max").write_text("4096\n")
    assert _read_allowed_bytes(tmp_path / "cgroup", own) == [4096]
    assert _read_allowed_bytes(tmp_path / "none", tmp_path / "none") == []


def test_what_is_above_the_limit_spills_to_disk(tmp_path: Path) -> None:
    store = LocalStore(SegmentPool(), 2 * MIB, str(tmp_path))
    refs = [keep(torch.full((MIB // 4,), float(at)), store, "maker") for at in range(6)]
    assert store.usage().nbytes <= 2 * MIB
    assert [float(ref.get()[-1]) for ref in refs] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert os.listdir(tmp_path) == [], "files without names"
    gone = LocalStore(SegmentPool(), MIB, str(tmp_path / "gone"))
    with pytest.raises(StoreFullError, match=r"no room in spill_dir"):
        keep(torch.ones(MIB), gone, "maker")


def test_small_blocks_travel_with_their_message() -> None:
    store = LocalStore(SegmentPool())
    assert type(store.put([np.zeros(100, np.uint8)], "a")) is PlainBlock
    assert store.usage().nbytes == 0


def test_a_check_finds_whoever_writes_to_what_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECKS, "1")
    ref = keep(torch.ones(1000), MemoryStore(shared=True), "policy.rollout of rank 1")
    assert torch.equal(ref.get(), torch.ones(1000))
    ref.get(readonly=True)[5] = 7.0
    with pytest.raises(DataError, match=r"made by policy\.rollout of rank 1 have changed"):
        ref.get()
