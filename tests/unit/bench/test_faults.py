"""What the suite of faults measures is what it says: the moment of a fault, and an error that waits for nobody."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import podium
from bench.context import Context
from bench.groups import peer_processes, probes
from bench.peers.faulty import fail_or_work
from bench.suites import faults


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(quick=True, logs=tmp_path, say=lambda text: None)


def test_the_one_that_fails_tells_when_and_the_others_are_busy() -> None:
    before_ns = time.monotonic_ns()
    with pytest.raises(RuntimeError) as caught:
        fail_or_work(rank=1, failing=1, lead_s=0.05, busy_s=9.0, computing=False)
    assert before_ns + 0.05e9 <= caught.value.args[0] <= time.monotonic_ns()
    for computing in (False, True):
        started, worked = time.monotonic(), time.process_time()
        fail_or_work(rank=0, failing=1, lead_s=0.0, busy_s=0.5, computing=computing)
        assert time.monotonic() - started >= 0.5
        assert (time.process_time() - worked > 0.1) == computing  # 0.5 where no other process wants the core


def test_an_error_waits_for_nobody_and_the_group_goes_on(context: Context) -> None:
    with podium.connect("local") as cluster:
        rows = {row.name: row for row in faults.fault_rows(context, cluster, {})}
        assert list(rows) == ["exception_4_local", "kill_4_local", "restart_4_local"]
        for fault in ("exception_4_local", "kill_4_local"):
            assert 0 < rows[fault].median < 1e3 * (faults.BUSY_S - faults.LEAD_S), "sooner than the others were done"
        with probes(cluster, 1) as group:
            assert len(group.pid()) == 1, "its pool was given back"


def test_a_peer_that_is_not_installed_is_noted_and_left_out(context: Context) -> None:
    with peer_processes(context, ("nobody",)) as peers:
        assert peers == {}
    assert context.absent == {"nobody"}
