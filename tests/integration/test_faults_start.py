"""Constructors that fail: the first cause is reported, and nothing is left behind.

Siblings are busy for ten minutes, twice the time limit of a test: what waits for them fails.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import podium
from podium import Cluster, Worker, colocate
from podium.errors import EndpointError, WorkerStartError
from tests.integration.fault_workers import StartsBadly
from tests.integration.processes import parent_of, run_script


@pytest.mark.parametrize("siblings", ["", "collective", "sleep"])
def test_a_constructor_that_raises_is_reported_while_its_siblings_are_busy(local: Cluster, siblings: str) -> None:
    with pytest.raises(WorkerStartError, match=r"rank 2 of 3(.|\n)*the constructor's own error") as caught:
        local.start(StartsBadly.bind(2, "raise", siblings=siblings), local.pool([3]), name="bad")
    assert caught.value.rank == 2
    assert isinstance(caught.value.__cause__, LookupError)
    assert "in __init__" in caught.value.remote_traceback


def test_a_constructor_that_ends_its_process_is_reported(local: Cluster) -> None:
    with pytest.raises(WorkerStartError, match=r"bad did not start: .*rank 1.*exit code 5") as caught:
        local.start(StartsBadly.bind(1, "exit", siblings="sleep"), local.pool([2]), name="bad")
    assert caught.value.rank == 1


def test_a_constructor_that_takes_too_long_is_reported_with_its_stack(local: Cluster) -> None:
    pool = local.pool([2])

    def start(seconds: float) -> None:
        local.start(StartsBadly.bind(1, "sleep"), pool, name="bad", start_timeout_s=seconds)

    assert reach_limit(start, r"deadline of {:g} s(.|\n)*time\.sleep\(600\)").rank == 1


def reach_limit(start: Callable[[float], None], says: str) -> WorkerStartError:
    """Have ``start``, which gets the limit in seconds, end at it where the error says ``says``.

    On a busy machine its processes may not be there in time. The start gets a longer limit then.
    """
    for seconds in (0.5, 5.0, 50.0):
        with pytest.raises(WorkerStartError) as caught:
            start(seconds)
        if re.search(says.format(seconds), str(caught.value)):
            return caught.value
    pytest.fail(f"the last error does not match {says}: {caught.value}")


def test_a_start_has_one_limit_for_its_processes_and_all_constructors(local: Cluster) -> None:
    def start(seconds: float) -> None:
        nap = _Naps.bind(seconds / 2)
        local.start(colocate(first=nap, second=nap, third=nap), start_timeout_s=seconds)

    reach_limit(start, r"(first|second|third) did not start: .*deadline of {:g} s")


class _Naps(Worker):
    def __init__(self, seconds: float) -> None:
        time.sleep(seconds)


def test_a_fork_server_that_takes_long_to_import_fails_a_start_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}):\n    time.sleep(0.01)\n"
    (tmp_path / "imported_slowly.py").write_text(waits)
    monkeypatch.syspath_prepend(tmp_path)
    with podium.connect("local", preload=["imported_slowly"]) as cluster:
        with pytest.raises(WorkerStartError, match=r"early-0: its process did not start within 0\.5 s"):
            cluster.start(Worker.bind(), cluster.pool([2]), name="early", start_timeout_s=0.5)
        (tmp_path / "go").touch()
        assert cluster.start(Worker.bind(), name="early").group.run(lambda worker: worker.ctx.rank) == [0]


def test_an_interpreter_that_does_not_start_is_reported_with_its_words(local: Cluster) -> None:
    with pytest.raises(WorkerStartError, match=r"encodings|Fatal Python error|platform"):
        local.start(StartsBadly.bind(9, "raise"), env={"PYTHONHOME": "/nowhere"}, name="homeless")


def test_after_a_failed_start_the_pool_and_the_name_are_free(local: Cluster) -> None:
    pool = local.pool([2])
    with pytest.raises(WorkerStartError):
        local.start(StartsBadly.bind(0, "raise"), pool, name="second_try")
    good = local.start(StartsBadly.bind(9, "raise"), pool, name="second_try")
    assert good.rank() == [0, 1]
    good.group.close()
    local.release(pool)


def test_a_restart_that_fails_says_so_until_one_succeeds(local: Cluster, tmp_path: Path) -> None:
    notes = tmp_path / "starts"
    worker = local.start(_FailsOnSecondStart.bind(str(notes)), name="phoenix")
    with pytest.raises(WorkerStartError, match="not this time"):
        worker.group.restart()
    with pytest.raises(EndpointError, match=r"phoenix is broken: its restart failed.*restart"):
        worker.rank()
    worker.group.restart()
    assert worker.rank() == [0]
    worker.group.close()


class _FailsOnSecondStart(StartsBadly):
    def __init__(self, notes: str) -> None:
        if self._starts(notes) == 2:
            raise LookupError("not this time")


def test_a_worker_whose_module_is_missing_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    """A module that the script made up by hand cannot be imported by a worker."""
    out = run_script(
        tmp_path,
        """
import sys, types, podium
from podium.errors import PodiumError
module = types.ModuleType("made_up")
exec("from podium.runtime import Worker\\nclass Ghost(Worker): pass", module.__dict__)
module.Ghost.__module__ = "made_up"
sys.modules["made_up"] = module
with podium.connect("local", preload=[]) as cluster:
    try:
        cluster.start(module.Ghost.bind())
    except PodiumError as error:
        print(type(error).__name__, error)
""",
    )
    assert "WorkerStartError" in out
    assert "made_up" in out


def test_eight_processes_start_from_a_warm_server(local: Cluster) -> None:
    eight = local.start(StartsBadly.bind(9, "raise"), local.pool([8]), name="eight", distributed=False)
    assert eight.rank() == list(range(8))
    assert len({parent_of(pid) for pid in eight.group.pids}) == 1
    eight.group.close()
