"""What the suite of faults measures is what it says: the moment of a fault, and an error that waits for nobody."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import podium
from bench.context import Context
from bench.groups import peer_processes, probes
from bench.peers.faulty import fail_or_work
from bench.suites import faults


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(quick=True, logs=tmp_path, say=lambda text: None)


class Products(TorchDispatchMode):
    """Counts the products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_the_one_that_fails_tells_when_and_the_others_are_busy() -> None:
    before_ns = time.monotonic_ns()
    with pytest.raises(RuntimeError) as caught:
        fail_or_work(rank=1, failing=1, lead_s=0.05, busy_s=9.0, computing=False)
    assert before_ns + 0.05e9 <= caught.value.args[0] <= time.monotonic_ns()
    for computing in (False, True):
        started = time.monotonic()
        with Products() as products:
            fail_or_work(rank=0, failing=1, lead_s=0.0, busy_s=0.5, computing=computing)
        assert time.monotonic() - started >= 0.5
        assert (products.count > 0) == computing


@pytest.mark.exhaustive
def test_an_error_waits_for_nobody_and_the_group_goes_on(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "BUSY_S", 1e6)  # whoever waits for the others waits for ever
    with podium.connect("local") as cluster:
        rows = {row.name: row for row in faults.fault_rows(context, cluster, {})}
        assert list(rows) == ["exception_4_local", "kill_4_local", "restart_4_local"]
        for fault in ("exception_4_local", "kill_4_local"):
            assert rows[fault].median > 0
        with probes(cluster, 1) as group:
            assert len(group.pid()) == 1, "its pool was given back"


def test_a_peer_that_is_not_installed_is_noted_and_left_out(context: Context) -> None:
    with peer_processes(context, ("nobody",)) as peers:
        assert peers == {}
    assert context.absent == {"nobody"}
