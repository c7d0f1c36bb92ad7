"""Shared memory that is used again after its last reader, read copy-on-write, and freed with its processes."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from podium.backends.local.shared_memory import (
    KEPT_COUNT,
    KEPT_IDLE,
    KEPT_VIEWS,
    Lease,
    SegmentPool,
    WrittenPages,
)
from podium.errors import RefLostError, StoreFullError

MIB = 1 << 20


def take(pool: SegmentPool, nbytes: int) -> Lease:
    return pool.take(nbytes, "a test")


def test_a_segment_is_used_again_only_after_its_last_reader() -> None:
    pool = SegmentPool()
    lease = take(pool, MIB)
    first = lease.segment
    pool.hold(first, "reader")
    pool.hold(first, "reader")
    pool.hold(first, "other")
    del lease
    gc.collect()
    for holder in ("reader", "other"):
        pool.release(first.key, holder)
        other = take(pool, MIB)
        assert other.segment is not first, "somebody still reads it"
        del other
    pool.release(first.key, "reader")
    assert pool.usage() == (0, 2 * first.nbytes)
    kept = [take(pool, MIB), take(pool, MIB)]
    assert first in [taken.segment for taken in kept]
    del kept
    pool.close()


def test_what_a_dead_reader_held_comes_back() -> None:
    pool = SegmentPool()
    leases = [take(pool, MIB) for _ in range(3)]
    segments = [taken.segment for taken in leases]
    for segment in segments:
        pool.hold(segment, "dead")
        pool.hold(segment, "alive")
    del leases
    pool.forget("dead")
    assert pool.usage()[0] > 0
    for segment in segments:
        pool.release(segment.key, "alive")
    assert pool.usage()[0] == 0
    pool.close()


def test_strange_releases_are_ignored() -> None:
    pool = SegmentPool()
    lease = take(pool, 10)
    pool.release(lease.segment.key, "nobody")
    pool.release((0, 10_000), "reader")
    assert pool.usage()[0] > 0
    del lease
    pool.close()
    assert pool.usage() == (0, 0)


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 100_000, MIB + 1])
def test_sizes_are_rounded_by_an_eighth_at_most(nbytes: int) -> None:
    pool = SegmentPool()
    lease = take(pool, nbytes)
    assert nbytes <= lease.segment.nbytes <= max(4096, nbytes * 9 // 8 + 4096)
    del lease
    pool.close()


def test_a_large_idle_segment_does_not_serve_a_small_request() -> None:
    pool = SegmentPool()
    large = take(pool, 64 * MIB)
    key = large.segment.key
    del large
    small = take(pool, MIB)
    assert small.segment.key != key
    del small
    pool.close()
    assert KEPT_IDLE >= 512 * MIB, "an echo of the largest batch that bench measures stays warm"


def test_readers_write_into_pages_of_their_own() -> None:
    pool = SegmentPool()
    lease = take(pool, MIB)
    lease.segment.memory[:] = 1
    readers = [lease.open(MIB) for _ in range(2)]
    readers[0][:10] = 7
    assert readers[1][:10].tolist() == [1] * 10
    assert lease.segment.memory[:10].tolist() == [1] * 10
    assert readers[0][10] == 1
    del readers, lease
    pool.close()


def own_pages() -> bool:
    """Whether the kernel tells which pages of a private mapping were written."""
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE, mmap.MAP_PRIVATE)
    array = np.frombuffer(memory, dtype=np.uint8)
    array[0] = 1
    known = WrittenPages()
    known.any(array.ctypes.data, 1)
    return known.known


@pytest.mark.skipif(not own_pages(), reason="needs Linux 6.7 or newer")
def test_a_private_mapping_is_kept_unless_it_was_written() -> None:
    writer, reader = SegmentPool(), SegmentPool()
    lease = take(writer, MIB)
    places: list[int] = []
    for value, written in ((1, False), (2, True), (3, False), (4, False)):
        lease.segment.memory[:] = value
        memory = reader.adopt(os.dup(lease.segment.fd), lambda: None).open(MIB)
        assert memory.min() == memory.max() == value, "what another reader wrote shows, or what the segment held before"
        places.append(memory.ctypes.data)
        if written:
            memory[MIB // 2] = 99
        other = reader.adopt(os.dup(lease.segment.fd), lambda: None).open(MIB)
        assert other.ctypes.data != places[-1], "two readers at a time have a mapping each"
        assert other.min() == other.max() == value
        del other, memory
        kept = [kind for (_, kind) in reader._views]
        assert kept == [mmap.MAP_PRIVATE], "one is kept for the next reader, of two of which one was written, too"
    assert places[1] == places[0]
    del lease
    writer.close()
    reader.close()


@pytest.mark.skipif(not own_pages(), reason="needs Linux 6.7 or newer")
def test_pages_that_were_written_are_found_wherever_they_are() -> None:
    pool, pages = SegmentPool(), WrittenPages()
    lease = take(pool, MIB)
    for at in (0, MIB // 2, MIB - 1):
        memory = lease.open(MIB)
        assert memory.sum() == 0
        assert not pages.any(memory.ctypes.data, MIB), "to read is not to write"
        memory[at] = 0
        assert pages.any(memory.ctypes.data, MIB)
        del memory
    del lease
    pool.close()


def test_a_file_on_disk_is_not_kept_by_a_mapping(tmp_path: Path) -> None:
    if os.stat(tmp_path).st_dev == os.stat("/dev/shm").st_dev:
        pytest.skip("the directory of this test is no disk")
    pool = SegmentPool()
    lease = pool.take_file(MIB, tmp_path, "a test")
    assert lease.open(MIB).sum() == 0
    assert not pool._views
    del lease
    pool.close()


def test_a_new_segment_is_written_before_it_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, write, writes = SegmentPool(), os.pwrite, list[int]()

    def write_some(fd: int, data: memoryview, at: int) -> int:
        writes.append(write(fd, data[:100_000], at))  # the kernel may write less than it was asked to
        return writes[-1]

    monkeypatch.setattr(os, "pwrite", write_some)
    buffers = [np.arange(nbytes, dtype=np.uint8) for nbytes in (MIB, 0, 77)]
    offsets = [0, MIB, MIB + 64]
    keys = set[object]()
    for _ in range(2):
        lease = pool.store(buffers, offsets, MIB + 4096, "a test")
        keys.add(lease.segment.key)
        memory = lease.open(MIB + 4096)
        for buffer, start in zip(buffers, offsets, strict=True):
            assert np.array_equal(memory[start : start + buffer.nbytes], buffer)
        assert sum(writes) == MIB + 77, "a segment that is used again is written through its mapping"
        buffers = [buffer + np.uint8(1) for buffer in buffers]
        del memory, lease
    assert len(keys) == 1, "the segment is used again"
    pool.close()


def test_memory_that_is_not_there_is_an_error_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    pool = SegmentPool()
    for call in ("pwrite", "posix_fallocate"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            with pytest.raises(StoreFullError, match=r"no shared memory for 1048576 bytes of a test: .*no space left"):
                pool.store([np.ones(MIB, np.uint8)], [0], MIB, "a test") if call == "pwrite" else take(pool, MIB)
        pool.close()
    assert pool.store([np.ones(MIB, np.uint8)], [0], MIB, "a test").open(MIB).all()
    pool.close()


def open_descriptors(fd: int) -> int:
    """How many descriptors of this process are open on the file of ``fd``; other threads open and close others."""
    wanted, found = os.fstat(fd), 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.path.samestat(os.fstat(int(name)), wanted)
    return found


def test_an_adopted_segment_is_released_with_its_last_view() -> None:
    writer, reader, released = SegmentPool(), SegmentPool(), list[int]()
    lease = take(writer, MIB)
    before = open_descriptors(lease.segment.fd)
    adopted = reader.adopt(os.dup(lease.segment.fd), lambda: released.append(1))
    memory = adopted.open(MIB)
    del adopted
    view = memory[100:200].view()
    del memory
    gc.collect()
    assert released == []
    del view
    gc.collect()
    assert released == [1]
    reader.close()  # with it goes the mapping that it kept
    assert open_descriptors(lease.segment.fd) == before
    del lease
    writer.close()


def test_an_adopted_segment_is_passed_on_until_its_last_holder_is_done() -> None:
    writer, pool, released = SegmentPool(), SegmentPool(), list[int]()
    source = take(writer, MIB)
    lease = pool.adopt(os.dup(source.segment.fd), lambda: released.append(1))
    key = lease.segment.key
    for holder in ("a", "b", "b"):
        pool.hold(lease.segment, holder)
    del lease
    pool.release(key, "b")
    pool.forget("a")
    assert released == []
    pool.release(key, "b")
    assert released == [1]
    pool.release(key, "b")
    assert released == [1]
    del source
    pool.close()


def test_what_comes_again_takes_no_second_descriptor() -> None:
    writer, reader, released = SegmentPool(), SegmentPool(), list[str]()
    own = take(writer, MIB)
    first = reader.adopt(os.dup(own.segment.fd), lambda: released.append("first"))
    again = reader.adopt(os.dup(first.segment.fd), lambda: released.append("again"))
    back = writer.adopt(os.dup(first.segment.fd), lambda: released.append("back"))
    assert again.segment is first.segment
    assert back.segment is own.segment
    assert released == ["again", "back"]
    del first
    assert released == ["again", "back"]
    del again, own
    assert released == ["again", "back", "first"]
    assert writer.usage()[0] > 0, "what came back is held still"
    del back
    assert writer.usage()[0] == 0
    writer.close()
    reader.close()


def test_a_forked_child_releases_nothing() -> None:
    writer, reader = SegmentPool(), SegmentPool()
    own = take(writer, MIB)
    told, tell = os.pipe()
    lease = reader.adopt(os.dup(own.segment.fd), lambda: [os.write(tell, b"x"), None][1])
    child = os.fork()
    if not child:
        del lease
        os._exit(0)
    os.waitpid(child, 0)
    os.set_blocking(told, False)
    with pytest.raises(BlockingIOError):
        os.read(told, 1)
    del lease
    assert os.read(told, 10) == b"x"
    for fd in (told, tell):
        os.close(fd)
    writer.close()
    reader.close()


def test_nothing_is_read_from_a_closed_pool() -> None:
    pool = SegmentPool()
    lease = take(pool, MIB)
    pool.close()
    with pytest.raises(RefLostError, match="what was kept was freed when its cluster was closed"):
        lease.open(MIB, "what was kept")


def test_readers_that_do_not_write_share_a_mapping_that_is_kept() -> None:
    writer, reader = SegmentPool(), SegmentPool()
    lease = take(writer, MIB)
    lease.segment.memory[:] = 1
    places: list[int] = []
    for value in (1, 2):
        lease.segment.memory[:] = value
        memory = reader.adopt(os.dup(lease.segment.fd), lambda: None).lend(1000, "it")
        assert not memory.flags.writeable
        assert memory.tolist() == [value] * 1000
        places.append(memory.ctypes.data)
        del memory
        assert reader.usage() == (0, 0), "a mapping that is kept holds nothing"
    assert places[0] == places[1]
    large = take(writer, KEPT_VIEWS + MIB)
    large.segment.memory[-1] = 7
    view = reader.adopt(os.dup(large.segment.fd), lambda: None).lend(KEPT_VIEWS, "it")
    again = reader.adopt(os.dup(lease.segment.fd), lambda: None).lend(10, "it")
    assert int(view[-1]) == 0, "too large to be kept, and alive as long as it is read"
    assert again.ctypes.data == places[0], "and it drives out no other"
    del view, again, lease, large
    reader.close()
    writer.close()


def segments_open() -> int:
    """How many descriptors of this process are memory. Threads of other tests may open and close files meanwhile."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(entry).startswith("/memfd:")
    return found


def test_views_that_are_kept_take_few_descriptors() -> None:
    writer, before = SegmentPool(), segments_open()
    leases = [take(writer, 4096) for _ in range(2 * KEPT_COUNT)]
    made = segments_open() - before
    assert made > 0
    for lease in leases:
        lease.lend(4096, "a block")
    assert segments_open() - before <= made + KEPT_COUNT
    leases.clear()
    writer.close()
