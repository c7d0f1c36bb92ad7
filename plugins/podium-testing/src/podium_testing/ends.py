"""Contract: starts within their limits, ends with their causes, and what neither of them may leave or change."""

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podium import telemetry
from podium.data.store import lay_out
from podium.errors import StoreFullError, WorkerDied, WorkerStartError
from podium.processes import descendants_of, kill
from podium.runtime import Backend, Cluster, Worker
from podium_testing.load_workers import end_as, read_environment, read_holdings, start_family
from podium_testing.processes import Started, make_site, read_written
from podium_testing.shipped import leave, read_surroundings
from podium_testing.target import LIMIT_S, Target, alive, all_gone, need, wait_for
from podium_testing.workers import Sleeper

__all__ = ["EndContract"]

LIMITS_S = (2.0, 8.0, 30.0)
"""Limits of starts: a longer one is tried where a busy machine may be the cause of the failure."""
ATTEMPTS = 5
SOON_S = 2.0  # the promise is one second
GONE_S = 60.0
ENDS = {0: "exit code 0", 200: "exit code 200", **{-number: f"signal {number.name}" for number in (
    signal.SIGKILL, signal.SIGTERM, signal.SIGVTALRM
)}}  # fmt: skip
FAMILY_ENDS: dict[str, Callable[[Any], object]] = {
    "is restarted": lambda group: group.restart(),
    "is closed": lambda group: group.close(),
    "exits": lambda group: group.function(leave).submit(),
    "is killed": lambda group: [os.kill(pid, signal.SIGKILL) for pid in group.pids],
}
SCRIPT = """
import os, sys, time
from podium_testing.load_workers import start_family

group = cluster.start(podium.Worker.bind(), cluster.pool([2]), distributed=False).group
family = [pid for pids in zip(*group.run(start_family)) for pid in pids]
print("PIDS", *group.pids, *family, flush=True)
while not os.path.exists({go!r}):
    time.sleep(0.01)
{end}
"""
SCRIPT_ENDS = {
    "a signal": "time.sleep(600)",
    "its last line": "",
    "an exception": "raise KeyError('nobody closes')",
    "an exit without cleaning up": "os._exit(3)",
}


class EndContract:
    @pytest.fixture
    @classmethod
    def backend(cls, cluster: Cluster) -> Backend:
        return cluster._backend  # pyright: ignore[reportPrivateUsage] - the point: what stands below the runtime

    # -- starts ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("part", "starts"), [(0.6, True), (1.5, False)], ids=["within", "beyond"])
    def test_a_process_has_its_whole_limit_to_start_and_no_more(
        self, cluster: Cluster, backend: Backend, tmp_path: Path, part: float, starts: bool
    ) -> None:
        need(cluster, "processes")
        for limit_s in LIMITS_S:
            directory = tmp_path / str(limit_s)
            directory.mkdir()
            timer = threading.Timer(part * limit_s, (directory / "go").touch)
            timer.start()
            try:
                Started(backend, 1, env=make_site(directory, 600.0), timeout_s=limit_s).close()
                has_started = True
            except WorkerStartError:
                has_started = False
            timer.join()
            for pid in read_written(directory):
                kill(pid)
            if has_started == starts:
                return
        pytest.fail(f"with limits of {LIMITS_S} s a process that needs {part:g} of its limit starts: {not starts}")

    def test_a_start_that_hangs_does_not_hold_up_another(
        self, cluster: Cluster, backend: Backend, tmp_path: Path
    ) -> None:
        need(cluster, "processes")
        errors: list[BaseException] = []

        def hang() -> None:
            try:
                Started(backend, 1, env=make_site(tmp_path, 600.0), timeout_s=LIMIT_S)
            except WorkerStartError as error:
                errors.append(error)

        thread = threading.Thread(target=hang)
        thread.start()
        try:
            assert wait_for(lambda: bool(read_written(tmp_path)), LIMIT_S)
            other = Started(backend, 1)
            assert other.answer(0, "record", record="here") == "here"
            other.close()
            assert thread.is_alive()
            assert not errors
        finally:
            for pid in read_written(tmp_path):
                kill(pid)
            thread.join()

    def test_variables_are_those_of_the_group_and_of_every_rank(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        env = {"PODIUM_CONTRACT_A": "a=b\nc", "PODIUM_CONTRACT_EMPTY": "", "PODIUM_CONTRACT_Ü": "ä"}
        names = [*env, "HOME"]
        before = {**os.environ}
        group = cluster.start(Worker.bind(), cluster.pool([2]), env=env, distributed=False).group
        for _ in range(2):
            assert group.run(read_environment, names) == [{**env, "HOME": before.get("HOME")}] * 2
            other = cluster.start(Worker.bind(), distributed=False).group
            assert other.run(read_environment, [*env]) == [dict.fromkeys(env)], "another group has none of them"
            other.close()
            group.restart()
        assert {**os.environ} == before, "neither has the controller"

    def test_each_start_and_restart_is_where_the_controller_is_then(
        self, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        need(cluster, "processes")
        group = cluster.start(Worker.bind(), distributed=False).group
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "found_by_path.py").write_text(f"FOUND = {name!r}\n")
            with monkeypatch.context() as context:
                context.syspath_prepend(tmp_path / name)
                context.chdir(tmp_path / name)
                group.restart()
                assert group.run(read_surroundings) == [(os.getcwd(), name)]
                other = cluster.start(Worker.bind(), distributed=False).group
                assert other.run(read_surroundings) == [(os.getcwd(), name)]
                other.close()

    # -- ends --------------------------------------------------------------------------------------------------------

    def test_each_end_has_its_cause_and_last_words(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        group = cluster.start(Worker.bind(), name="ending", distributed=False).group
        for end, cause in ENDS.items():
            if end == -signal.SIGTERM and not cluster.capabilities.exit_status:
                continue  # the runtime that owns the process may let it finish its call
            with pytest.raises(WorkerDied) as caught:
                group.run(end_as, end)
            words = [line for line in caught.value.last_words if line.startswith("word ")]
            assert words == [f"word {at}" for at in range(8)], cause
            assert caught.value.cause == cause or not cluster.capabilities.exit_status
            group.restart()

    def test_an_end_is_heard_within_seconds(self, cluster: Cluster) -> None:
        """In one of several attempts, for a busy machine, before a call of two seconds has ended."""
        need(cluster, "processes", "concurrent")
        sibling = cluster.start(Sleeper.bind(), distributed=False)
        victim = cluster.start(Worker.bind(), name="victim", distributed=False).group
        heard: list[telemetry.WorkerLost] = []
        unsubscribe = telemetry.subscribe(
            lambda event: heard.append(event) if isinstance(event, telemetry.WorkerLost) else None
        )
        try:
            for _ in range(ATTEMPTS):
                os.kill(victim.pids[0], signal.SIGKILL)
                sibling.sleep(SOON_S)
                if heard:
                    return
                assert wait_for(lambda: bool(heard), LIMIT_S)
                heard.clear()
                victim.restart()
        finally:
            unsubscribe()
        pytest.fail(f"{ATTEMPTS} of {ATTEMPTS} ends were not heard within {SOON_S:g} s")

    def test_threads_may_kill_at_once(self, cluster: Cluster, backend: Backend) -> None:
        need(cluster, "processes")
        for _ in range(5):
            raw = Started(backend, 1)
            lacking: list[int] = []

            def end(raw: Started = raw, lacking: list[int] = lacking) -> None:
                raw.handles[0].kill()
                lacking.extend([] if raw.deaths else [1])

            threads = [threading.Thread(target=end) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            raw.close()
            assert (len(raw.deaths), lacking) == (1, []), "each kill returns when the end was reported"

    @pytest.mark.parametrize("end", FAMILY_ENDS)
    def test_whatever_a_process_started_ends_when_it(self, cluster: Cluster, end: str) -> None:
        need(cluster, "processes")
        group = cluster.start(Worker.bind(), distributed=False).group
        (family,) = group.run(start_family)
        of_group = len(family) - 1  # another runtime, which owns the processes, ends process groups
        try:
            assert all(alive(pid) for pid in family)
            FAMILY_ENDS[end](group)
            assert not all_gone(family if cluster.capabilities.exit_status else family[:of_group], GONE_S)
        finally:
            for pid in family:
                kill(pid)

    def test_closing_from_threads_and_with_calls_in_flight(self, target: Target) -> None:
        children = read_holdings().children
        cluster = target.connect()
        need(cluster, "processes", "concurrent")
        sleeper = cluster.start(Sleeper.bind(), cluster.pool([2]), distributed=False)
        pids = sleeper.group.pids
        sleeper.wait_for_event.submit(LIMIT_S)
        left: list[int] = []

        def close() -> None:
            cluster._backend.close()  # pyright: ignore[reportPrivateUsage] - closed below the runtime
            left.extend(all_gone(pids, 0.0 if cluster.capabilities.exit_status else GONE_S))

        threads = [threading.Thread(target=close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        cluster.close()
        assert not left, "a call of close returned while processes ran"
        if cluster.capabilities.exit_status:  # another runtime keeps processes as long as any cluster is connected
            assert wait_for(lambda: read_holdings().children <= children, GONE_S), "a child runs, or was not reaped"

    # -- the script --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("end", SCRIPT_ENDS)
    def test_nothing_outlives_a_script_that_ends_by(
        self, target: Target, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
    ) -> None:
        need(cluster, "processes")
        everything: set[int] = set()
        with tempfile.TemporaryDirectory(prefix="podium-") as temporary:  # short, for the names of sockets
            monkeypatch.setenv("TMPDIR", temporary)
            script = target.run_script(tmp_path, SCRIPT.format(go=str(tmp_path / "go"), end=SCRIPT_ENDS[end]))
            try:
                assert script.stdout is not None
                line = next((text for text in script.stdout if text.startswith("PIDS ")), "")
                workers = [int(word) for word in line.split()[1:]]
                assert len(workers) == 8
                everything = {*descendants_of(script.pid), *workers}
                (tmp_path / "go").touch()
                if end == "a signal":
                    script.terminate()
                assert wait_for(lambda: script.poll() is not None, GONE_S), "the script itself goes on"
                if cluster.capabilities.exit_status:  # a runtime that owns the processes ends its own when it likes
                    assert not all_gone(everything, GONE_S)
                    assert wait_for(lambda: not os.listdir(temporary), GONE_S), os.listdir(temporary)
                assert not all_gone(workers[: 8 if cluster.capabilities.exit_status else 4], GONE_S)
            finally:
                script.kill()
                script.communicate()
                for pid in everything:
                    kill(pid)

    # -- the store ---------------------------------------------------------------------------------------------------

    def test_a_store_copies_counts_names_and_refuses(self, backend: Backend) -> None:
        store = backend.store()
        before = store.usage().nbytes
        buffers = [np.arange(102_400, dtype=np.uint8), np.full(7, 9, dtype=np.uint8), np.zeros(0, dtype=np.uint8)]
        for count in (1, 2, 3):
            sent = [buffer.copy() for buffer in buffers[:count]]
            block = store.put(sent, f"maker {count}")
            for buffer in sent:
                buffer.fill(1)
            memory = block.open()
            for offset, buffer in zip(_offsets(sent), buffers, strict=False):
                assert np.array_equal(memory[offset : offset + buffer.nbytes], buffer), "a block is a copy"
            if memory.flags.writeable:
                memory[:50] = 77
                assert np.array_equal(block.open()[:50], buffers[0][:50]), "writes are the reader's own"
            assert np.array_equal(block.lend()[:50], buffers[0][:50])
            assert (block.info.nbytes >= 100_000, block.info.label) == (True, f"maker {count}")
            assert store.usage().nbytes - before >= 100_000
            assert any(label == f"maker {count}" for label, _ in store.usage().holders)
            del block, memory
            assert wait_for(lambda: store.usage().nbytes == before, LIMIT_S), "the last reader frees a block"
        store.limit, limit = before + 50_000, store.limit
        try:
            with pytest.raises(StoreFullError, match="no room for"):
                _ = store.put(buffers, "too large")
        finally:
            store.limit = limit


def _offsets(buffers: Sequence[np.ndarray[Any, Any]]) -> list[int]:
    return lay_out(buffers)[0]
