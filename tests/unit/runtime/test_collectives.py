"""The process group of a set of workers: how long its collectives wait, and what carries them on a shared device."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import podium
from podium import Worker
from podium.devices import collectives_of
from podium.errors import ConfigError, DeadlineExceeded, SerializationError, WorkerStartError
from podium.runtime import Cluster
from podium.runtime.calls import process_calls
from podium.runtime.calls.process_calls import ProcessCalls
from podium.runtime.process_set import _share_devices
from tests.waits import LONG_S


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with podium.connect("local", preload=["torch.distributed"]) as running:
        yield running


def limits(worker: Worker) -> list[float]:
    """Seconds after which a collective fails now, by process group."""
    groups = dist.distributed_c10d._world.pg_map
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


def make_subgroup(worker: Worker) -> None:
    dist.new_group([0, 1], backend="gloo")


def test_collectives_wait_as_long_as_the_call_in_which_they_are(cluster: Cluster) -> None:
    later = process_calls.COLLECTIVES_LATER_S
    group = cluster.start(Worker.bind(), cluster.pool([2]), timeout_s=900, distributed=True).group
    assert group.run(limits) == [[900 + later]] * 2
    group.run(make_subgroup)
    within = group.function(limits).within
    for timeout_s in (40.0, 4000.0, 900.0):
        assert within(timeout_s=timeout_s)() == [[timeout_s + later] * 2] * 2
    assert within(timeout_s=float("inf"))()[0][0] > 86400
    group.close()


def test_collectives_wait_as_long_as_the_call_after_a_restart_and_after_a_start_that_fails(cluster: Cluster) -> None:
    """The processes know the limit that the script believes they know. A worker that joined has another one."""
    later = process_calls.COLLECTIVES_LATER_S
    first = cluster.start(Worker.bind(), cluster.pool([2]), start_timeout_s=500, timeout_s=50, distributed=True)
    second = cluster.start(Worker.bind(), into=first, start_timeout_s=700, timeout_s=60, name="second")
    within = second.group.function(limits).within
    assert within(timeout_s=700)() == within(timeout_s=700)() == [[700 + later]] * 2
    second.group.restart()
    for timeout_s in (500.0, 700.0, 60.0):
        assert within(timeout_s=timeout_s)() == [[timeout_s + later]] * 2
        second.group.restart()
        assert within(timeout_s=timeout_s)() == [[timeout_s + later]] * 2
    with pytest.raises(SerializationError):
        cluster.start(Unsendable.bind(threading.Lock()), into=first, start_timeout_s=800, timeout_s=900)
    for timeout_s in (900.0, 800.0):
        assert within(timeout_s=timeout_s)() == [[timeout_s + later]] * 2
    first.group.close()
    second.group.close()


class Unsendable(Worker):
    def __init__(self, lock: object) -> None: ...


def test_a_worker_that_joined_has_its_own_limit_when_it_is_restarted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cluster.start(Worker.bind(), cluster.pool(1), start_timeout_s=500, name="first")
    cluster.start(Worker.bind(), into=first, start_timeout_s=700, name="second")
    limits_s = dict[str, float]()
    request = ProcessCalls.request

    def note_limit(
        calls: ProcessCalls, label: str, method: str, timeout_s: float, shared: Any, *a: Any, **k: Any
    ) -> Any:
        result = request(calls, label, method, timeout_s, shared, *a, **k)
        limits_s[f"{method} {len(limits_s)}"] = timeout_s
        return result

    monkeypatch.setattr(ProcessCalls, "request", note_limit)
    first.group.restart()
    assert limits_s == {"construct 0": 500, "construct 1": 700}
    first.group.processes.close()


def meet(worker: Worker, late_s: float) -> float:
    if worker.ctx.rank == 1:
        time.sleep(late_s)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def stand_alone(worker: Any) -> str:
    if worker.ctx.rank == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError:
            worker.freed = True
    return "left"


def test_a_collective_outlasts_no_deadline_and_no_deadline_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may come late within a long deadline, after calls with a short one. A rank that waits for one that never
    comes is free again soon after the deadline."""
    monkeypatch.setattr(process_calls, "COLLECTIVES_LATER_S", 0.5)
    group = cluster.start(Worker.bind(), cluster.pool([2]), distributed=True).group
    assert group.run(meet, 0.0) == [2.0, 2.0]  # from here on the processes have imported this module
    with monkeypatch.context() as shorter:
        shorter.setattr(process_calls, "COLLECTIVES_LATER_S", 0.5 - LONG_S)
        assert group.function(limits).within(timeout_s=LONG_S)() == [[0.5]] * 2  # and no rank enters a collective
    assert group.function(meet).within(timeout_s=2 * LONG_S)(3.0) == [2.0, 2.0]
    with pytest.raises(DeadlineExceeded):
        group.function(stand_alone).within(timeout_s=2)()
    freed = group.function(lambda worker: worker.freed, on=0).within(timeout_s=LONG_S)()
    assert freed == [True]
    group.close()


def test_two_ranks_on_one_device_are_told_apart_from_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with podium.connect("inline") as cluster:
        halves, whole, cores = cluster.pool([4], gpus=0.5), cluster.pool([1], gpus=2), cluster.pool([2])
        assert _share_devices(halves)
        assert _share_devices(halves[0:2])
        assert not _share_devices(halves[1:3])
        assert not _share_devices(halves[1:3] + whole)
        assert _share_devices(whole + whole)
        assert not _share_devices(cores + cores)


def test_gloo_carries_collectives_where_ranks_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert collectives_of((0,)) == ("cpu:gloo,cuda:nccl", torch.device("cuda", 0))
    assert collectives_of((0,), shared=True) == ("gloo", None)
    assert collectives_of((), shared=True) == ("gloo", None)
    gloo: Any = dist.Backend("gloo")
    backends = dist.distributed_c10d.BackendConfig(gloo)
    assert set(backends.device_backend_map) >= {"cpu", "cuda"}


def total_by_gloo(worker: Worker) -> tuple[str, float]:
    total = torch.ones(1)
    dist.all_reduce(total)
    return dist.get_backend(), total.item()


def test_ranks_on_one_device_form_a_group_that_nccl_would_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With processes that believe to see CUDA, in a torch without NCCL: a group on two devices asks for it."""
    if torch.cuda.is_available():
        pytest.skip("NCCL would find devices")
    (tmp_path / "believes_in_cuda.py").write_text("import torch\ntorch.cuda.is_available = lambda: True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with podium.connect("local", preload=["believes_in_cuda"]) as cluster:
        apart = cluster.pool([2], gpus=1)
        with pytest.raises(WorkerStartError, match=r"(?i)nccl|device_id cuda:0"):
            cluster.start(Worker.bind(), apart, distributed=True)
        cluster.release(apart)
        shared = cluster.start(Worker.bind(), cluster.pool([2], gpus=0.5), distributed=True)
        assert shared.group.run(total_by_gloo) == [("gloo", 2.0)] * 2


def test_npus_that_ranks_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.devices._accelerator", lambda: "npu")
    with pytest.raises(ConfigError, match=r"on one NPU.*placement\.ranks"):
        collectives_of((0,), shared=True)
