"""Failures on Ray: quickly named, with nothing left behind; large values and their memory; replicas."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import podium
from podium import Cluster, Handle
from podium.errors import EndpointError, SerializationError, StoreFullError, WorkerDied, WorkerStartError
from podium_testing.workers import Stash
from tests.integration.processes import alive
from tests.integration.ray_workers import Busy, add_rank, make_zeros, total
from tests.waits import all_end, wait_until

pytestmark = pytest.mark.ray

MIB = 1 << 20
STORE = {"object_store_memory": 300 * MIB, "_system_config": {"local_fs_capacity_threshold": 0.001}}
"""A small object store on a disk that counts as full: what is not freed at once is an error."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Embedded: it ends with the module."""
    with podium.connect("ray", preload=(), init={"num_cpus": 2, **STORE}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair(cluster: Cluster) -> Handle[Busy]:
    """Two workers; a test that breaks them restarts them."""
    return cluster.start(Busy.bind(), cluster.pool([2]), name="pair", distributed=False)


# -- failures --------------------------------------------------------------------------------------------------------


def test_an_exception_is_raised_while_siblings_are_busy(pair: Handle[Busy]) -> None:
    with pytest.raises(EndpointError, match="the first cause") as caught:
        pair.raise_on(1)  # the sibling is busy for longer than a test may take
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, LookupError)
    pair.group.restart()
    assert pair.ping(1) == [1, 1]


def test_while_ray_takes_its_time_the_log_says_for_what(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("podium_ray.backend.START_SAYS_S", 0.5)
    (tmp_path / "sleepy.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        podium.connect("ray", preload=("sleepy",)) as slow,
        pytest.raises(WorkerStartError, match=r"Ray did not start late-0, late-1 within 3 s\..*niceness"),
    ):
        slow.start(Busy.bind(), slow.pool([2]), name="late", distributed=False, start_timeout_s=3.0)
    assert any("Ray has not started late-0, late-1 for" in record.message for record in caplog.records)


def test_a_killed_worker_is_named_while_siblings_are_busy_and_takes_its_children_along(pair: Handle[Busy]) -> None:
    children = pair.child()
    victim, other = pair.group.pids[1], pair.group.pids[0]
    call = pair.wait.submit()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="rank 1 of pair") as caught:
        call.result(60.0)
    assert "worker process has died" in caught.value.cause
    assert all_end([victim, children[1]])
    assert alive(other)
    assert alive(children[0])
    pair.group.restart()
    assert pair.ping(2) == [2, 2]
    assert all_end([other, children[0]]), "a restart ends them all"


def test_an_actor_that_somebody_else_kills_is_named(cluster: Cluster) -> None:
    import ray

    kept = cluster.start(Busy.bind(), name="kept", detached=True, distributed=False)
    call = kept.wait.submit()
    ray.kill(ray.get_actor("kept:0", namespace="podium"))
    with pytest.raises(WorkerDied, match=r"rank 0 of kept .* killed by `ray\.kill`"):
        call.result(60.0)


# -- large values ----------------------------------------------------------------------------------------------------


def test_two_hundred_megabytes_go_there_and_back(cluster: Cluster) -> None:
    one = cluster.start(Busy.bind(), name="one", distributed=False)
    value = np.arange(25 * MIB)
    assert value.nbytes == 200 * MIB
    assert one.group.run(total, value) == [int(value.sum())]
    (got,) = one.group.run(make_zeros, 200)
    assert got.nbytes == 200 * MIB
    got += 1
    assert int(got[-1]) == 1
    one.group.close()


def test_memory_of_a_result_is_free_when_it_is_dropped(pair: Handle[Busy]) -> None:
    # There is room for one, not for two. Ray frees what is dropped a moment later, on a busy machine a long one.
    for _ in range(4):
        assert wait_until(lambda: room_for(pair, 100, total))
    for _ in range(3):
        assert wait_until(lambda: room_for(pair, 200))


def room_for(pair: Handle[Busy], mib: int, read: Callable[[Any, Any], int] | None = None) -> bool:
    """Whether there is room for a result, which is then written to and, if so asked, read by all ranks."""
    try:
        got = pair.group.run_on(0, make_zeros, mib)
        assert got[-1] == 0
        got[:] = 7
        if read is not None:
            assert pair.group.run(read, got) == [7 * mib * MIB] * 2
        return True
    except EndpointError as error:
        assert isinstance(error.__cause__, SerializationError)
        return False


def test_what_finds_no_room_says_how_much_and_what_to_do(pair: Handle[Busy]) -> None:
    remedy = "Free disk space.*object_store_memory"
    with pytest.raises(SerializationError, match=f"pair.echo: an argument of 400 MiB.*{remedy}"):
        pair.echo(np.zeros(400 * MIB, np.uint8))
    with pytest.raises(EndpointError, match=f"the result.*{remedy}") as caught:
        pair.group.run_on(1, make_zeros, 400)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, SerializationError)
    assert pair.ping(3) == [3, 3], "nobody died of it"


@pytest.mark.parametrize("store_bytes", [80 * MIB, None])
def test_a_store_that_is_full_says_who_holds_what(cluster: Cluster, store_bytes: int | None) -> None:
    """At its own limit, or at that of Ray's, where nothing can be spilled; what is dropped makes room."""
    with podium.connect("ray", preload=(), store_bytes=store_bytes) as limited:
        stash = limited.start(Stash.bind(), name="stash", distributed=False)
        mib = 60 if store_bytes else 200
        held: Any = stash.make(mib, MIB // 4)
        said = (
            "It is held by: 60 MiB made by stash.make of rank 0"
            if store_bytes
            else "200 MiB made by .*object_store_mem"
        )
        with pytest.raises(EndpointError, match=f"StoreFullError.*{said}") as caught:
            stash.make(mib, MIB // 4)
        assert isinstance(caught.value.__cause__, StoreFullError)
        assert stash.total(held[0]) == [0.0]
        del held
        assert wait_until(lambda: [usage for usage in stash.group.stores() if usage and usage.nbytes] == [])
        assert len(stash.make(mib, MIB // 4)[0]) == mib


@pytest.mark.parametrize("elements", [1000, 4 * MIB])
def test_a_worker_may_write_into_its_argument(pair: Handle[Busy], elements: int) -> None:
    """Whether it travels in the message or through the object store: neither another rank nor the script sees it."""
    value = np.ones(elements)
    results = pair.group.run(add_rank, value)
    assert [float(result[-1]) for result in results] == [1.0, 2.0]
    assert float(value.sum()) == elements
    results[0][:] = 9
    assert float(results[1][-1]) == 2.0
    again = pair.group.run_on(1, add_rank, value)
    assert (float(again[0]), float(value[0])) == (2.0, 1.0)


# -- replicas --------------------------------------------------------------------------------------------------------


def test_a_replica_dies_alone_and_is_made_anew(cluster: Cluster) -> None:
    from tests.integration.ray_nodes import groups_held

    replicas = cluster.start_replicas(Busy.bind(), 3, cpus=0.5, name="engine", distributed=False)
    assert len(groups_held()) == 3, "each with a placement group of its own"
    pids = [replica.group.pids[0] for replica in replicas]
    busy = [replica.wait.submit() for replica in replicas]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="engine-1"):
        busy[1].result(60.0)
    assert replicas.alive == [0, 2]
    assert [replicas[number].ping(number) for number in (0, 2)] == [[0], [2]]
    replicas.restart(1)
    assert replicas.alive == [0, 1, 2]
    assert replicas[1].ping(1) == [1]
    for call in replicas.submit("let_go"):
        call.result(60.0)
    assert [busy[number].result(60.0) for number in (0, 2)] == [[True]] * 2, "they were never disturbed"
    assert [replicas[number].group.pids[0] for number in (0, 2)] == [pids[0], pids[2]]
    replicas.close()
    assert wait_until(lambda: not groups_held()), "nobody else could give their slots back"
    cluster.release(cluster.pool([2], cpus=1))
