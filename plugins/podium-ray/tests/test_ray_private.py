"""Private pages over an object of Ray's store: a file that this process maps shared, and may open again."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from podium.data.store import Bytes

MIB = 1 << 20
pytestmark = pytest.mark.ray


@pytest.fixture
def objects() -> Iterator[tuple[Bytes, int]]:
    """The pages of a deleted file, as the store's, and its descriptor, which stands for the raylet's."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(8 * MIB)
        memory = np.frombuffer(mmap.mmap(file.fileno(), 8 * MIB), np.uint8)
        memory[:] = np.arange(8 * MIB) % 251
        yield memory, file.fileno()


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    from podium_ray import private

    monkeypatch.setattr(private, "_read_raylets", lambda: iter([os.getpid()]))
    private._files.clear()
    private._paths.clear()
    yield private
    private._files.clear()
    private._paths.clear()


def count_descriptors_and_mappings() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("-p ")


def test_what_is_written_is_the_readers_own(private: object, objects: tuple[Bytes, int]) -> None:
    from podium_ray.private import map_privately

    memory, _ = objects
    for begin, nbytes in ((100, 2 * MIB), (4096 * 3 + 7, 3 * MIB + 5), (0, 8 * MIB)):
        shown = memory[begin : begin + nbytes]
        first, second = (map_privately(shown.ctypes.data, nbytes, shown) for _ in range(2))
        assert first is not None
        assert second is not None
        assert np.array_equal(first, shown)
        first[:] = 255
        second[-1] = 254
        assert (shown[0], shown[-1]) == (begin % 251, (begin + nbytes - 1) % 251)
        assert (first[-1], second[0], second[-1]) == (255, begin % 251, 254)


def test_a_mapping_ends_with_its_last_array_and_keeps_its_owner(private: object, objects: tuple[Bytes, int]) -> None:
    from podium_ray.private import map_privately

    memory, _ = objects
    owner = np.zeros(1)
    address = memory.ctypes.data
    assert map_privately(address, MIB, owner) is not None
    before, holders = count_descriptors_and_mappings(), sys.getrefcount(owner)
    views = [map_privately(address + at * MIB, MIB, owner)[at:] for at in range(5)]  # type: ignore[index] - they are there
    assert count_descriptors_and_mappings()[0] == before[0], "no descriptor stays"
    assert sys.getrefcount(owner) >= holders + 5
    views.clear()
    assert count_descriptors_and_mappings() == before
    assert sys.getrefcount(owner) == holders


def test_without_the_file_or_for_little_there_is_no_mapping(
    private: object, objects: tuple[Bytes, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from podium_ray import private as module

    memory, descriptor = objects
    assert module.map_privately(memory.ctypes.data, MIB - 1, memory) is None
    elsewhere = np.zeros(2 * MIB, np.uint8)
    assert module.map_privately(elsewhere.ctypes.data, 2 * MIB, elsewhere) is None, "no file is mapped there"
    assert module.map_privately(memory.ctypes.data, 2 * MIB, memory) is not None
    (path,) = module._paths.values()
    assert path == f"/proc/{os.getpid()}/fd/{descriptor}"
    with open(os.devnull) as other:  # the raylet's number is another file's now
        module._paths.update(dict.fromkeys(module._paths, f"/proc/{os.getpid()}/fd/{other.fileno()}"))
        assert module.map_privately(memory.ctypes.data, 2 * MIB, memory) is None
    assert module.map_privately(memory.ctypes.data, 2 * MIB, memory) is not None, "it is looked for again"
    module._paths.clear()
    monkeypatch.setattr(module, "_read_raylets", lambda: iter([1 << 22]))
    assert module.map_privately(memory.ctypes.data, 2 * MIB, memory) is None, "no such process"
