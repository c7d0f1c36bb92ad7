"""References on backends with options: checks, limits, spilling, and what a busy group leaves behind."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import podium
from podium import Cluster, Worker, endpoint, first, reduce
from podium.data.store import CHECKS
from podium.errors import ConfigError, EndpointError, RefLostError, StoreFullError
from tests.integration.processes import descriptors
from tests.waits import wait_until

MIB = 1 << 20


class Keeper(Worker):
    @endpoint(returns="ref", collect=first())
    def make(self, mib: int) -> Tensor:
        return torch.ones(mib << 18)

    @endpoint(readonly=True, collect=first())
    def cheat(self, value: Tensor, fail: bool = False) -> float:
        value += 1
        if fail:
            raise ValueError("as asked")
        return float(value[0])

    @endpoint(readonly=True, collect=first())
    def peek(self, value: Tensor) -> float:
        return float(value[0])

    @endpoint(collect=reduce("mean"))
    def loss(self) -> dict[str, Tensor]:
        return {"loss": torch.tensor(float(self.ctx.rank))}

    @endpoint(collect=reduce("max"))
    def most(self) -> Tensor:
        return torch.tensor(self.ctx.rank)

    @endpoint(collect=first())
    def head(self, values: list[Tensor]) -> float:
        return float(values[0][0])

    @endpoint(returns="ref", receives="ref", collect=first())
    def echo(self, value: Tensor) -> Tensor:
        return value

    @endpoint(collect=first())
    def total(self, value: Tensor) -> float:
        return float(value.sum())


@pytest.mark.parametrize("backend", ["inline", "local"])
def test_a_check_names_the_endpoint_that_writes_to_what_it_only_reads(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHECKS, "1")
    with podium.connect(backend) as cluster:
        keeper = cluster.start(Keeper.bind(), name="keeper", distributed=False)
        ref = keeper.make(1)
        assert keeper.total(ref) == MIB / 4
        with pytest.raises(
            EndpointError, match=r"keeper\.cheat declares readonly=True and wrote to .* made by keeper\.make"
        ):
            keeper.cheat(ref)


@pytest.mark.parametrize("backend", ["inline", "local"])
def test_a_full_store_fails_the_call_and_names_the_holders(backend: str) -> None:
    with podium.connect(backend, store_bytes=10 * MIB) as cluster:
        keeper = cluster.start(Keeper.bind(), name="keeper", distributed=False)
        held = [keeper.make(4), keeper.make(5)]
        with pytest.raises(EndpointError, match=r"no room for 4 MiB .* held by: .*keeper\.make of rank 0") as error:
            keeper.make(4)
        assert isinstance(error.value.__cause__, StoreFullError)
        held.pop()
        gc.collect()
        assert wait_until(lambda: (keeper.group.stores()[0] or [0])[0] < 5 * MIB)
        assert keeper.total(keeper.make(4)) == MIB


def test_what_does_not_fit_goes_to_disk_if_there_is_some(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"spill_dir=.*this directory does not exist"):
        podium.connect("local", spill_dir=tmp_path / "missing")
    with podium.connect("local", store_bytes=5 * MIB, spill_dir=tmp_path) as cluster:
        keeper = cluster.start(Keeper.bind(), name="keeper", distributed=False)
        held = [keeper.make(4) for _ in range(4)]
        assert [keeper.total(ref) for ref in held] == [float(MIB)] * 4
        assert os.listdir(tmp_path) == []


def test_descriptors_are_given_back(cluster: Cluster) -> None:
    keeper = cluster.start(Keeper.bind(), name="keeper", distributed=False)
    keeper.total(keeper.make(1))
    gc.collect()
    before = [descriptors(pid) for pid in (os.getpid(), *keeper.group.pids)]
    held = [keeper.make(1) for _ in range(50)]
    assert [keeper.total(ref) for ref in held] == [MIB / 4] * 50
    assert descriptors(os.getpid()) > before[0] + 40
    held.clear()
    gc.collect()
    assert wait_until(lambda: descriptors(os.getpid()) <= before[0] + 5)
    # 64 idle segments, and as many mappings of each kind, stay for reuse.
    assert wait_until(lambda: descriptors(keeper.group.pids[0]) <= before[1] + 3 * 64)


@pytest.mark.parametrize("source", ["inline", "local"])
@pytest.mark.parametrize("target", ["inline", "local"])
def test_what_one_cluster_keeps_reaches_another_by_value(cluster: Cluster, source: str, target: str) -> None:
    with podium.connect(source) as one, podium.connect("inline") as inline:
        other = cluster if target == "local" else inline
        keeper = one.start(Keeper.bind(), distributed=False)
        reader = other.start(Keeper.bind(), distributed=False)
        ref: Any = keeper.make(1)
        assert [reader.total(ref) for _ in range(3)] == [MIB / 4] * 3
        assert keeper.total(ref) == MIB / 4
    with pytest.raises(RefLostError, match=r"keeper\.make.*cluster") if source == "local" else nullcontext():
        ref.get()


def test_a_reference_passed_to_and_fro_holds_no_more_descriptors(cluster: Cluster) -> None:
    keeper = cluster.start(Keeper.bind(), name="keeper", distributed=False)
    ref = keeper.echo(keeper.make(1))
    before = [descriptors(pid) for pid in (os.getpid(), *keeper.group.pids)]
    for _ in range(50):
        ref = keeper.echo(ref)
    pids = (os.getpid(), *keeper.group.pids)
    assert wait_until(lambda: all(descriptors(pid) <= most for pid, most in zip(pids, before, strict=True)))
    assert keeper.total(ref) == MIB / 4


@pytest.mark.parametrize("backend", ["inline", "local"])
def test_what_is_reduced_is_fetched(cluster: Cluster, backend: str) -> None:
    with podium.connect("inline") as inline:
        where = cluster if backend == "local" else inline
        keeper = where.start(Keeper.bind(), where.pool([2]), distributed=False, returns="ref")
        assert keeper.loss() == {"loss": torch.tensor(0.5)}
        assert keeper.most() == torch.tensor(1)


@pytest.mark.parametrize("backend", ["inline", "local"])
def test_a_call_that_wrote_and_failed_is_not_blamed_on_the_next(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECKS, "1")
    with podium.connect(backend) as cluster:
        keeper = cluster.start(Keeper.bind(), name="keeper", distributed=False)
        with pytest.raises(EndpointError, match="as asked"):
            keeper.cheat(keeper.make(1), fail=True)
        assert keeper.peek(keeper.make(1)) == 1.0


def test_a_worker_without_descriptors_fails_the_call_and_goes_on(cluster: Cluster) -> None:
    keeper = cluster.start(Keeper.bind(), name="keeper", distributed=False)
    held = [keeper.make(1) for _ in range(40)]
    reader = cluster.start(Keeper.bind(), name="reader", distributed=False)
    reader.group.run(lambda worker: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)))
    with pytest.raises(EndpointError, match=r"an argument of reader\.head .*40 open files.*ulimit -n"):
        reader.head(held)
    assert reader.head(held[:2]) == 1.0


@pytest.fixture
def cluster(local: Cluster) -> Iterator[Cluster]:
    """One whose groups end with the test."""
    before = {*local.groups}
    yield local
    for name, group in local.groups.items():
        if name not in before:
            group.close()
