"""Contract: nodes, reservations and worker processes, as a backend itself gives them to the runtime."""

import itertools
import os
import pickle
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import podium
from podium import telemetry
from podium.errors import CallCancelled, DeadlineExceeded, PlacementError, PodiumError, WorkerDied, WorkerStartError
from podium.processes import kill
from podium.runtime import Backend, Cluster, Place, ProcessSpec, Reply, Request, Worker, backend_class, wait
from podium.runtime.messages import Capabilities, Death
from podium_testing.shipped import (
    KeepsItsResults,
    leave,
    read_devices,
    read_pid,
    read_surroundings,
    read_threads,
    start_child,
)
from podium_testing.target import LIMIT_S, Target, alive, all_gone, need, wait_for
from podium_testing.workers import Counter, Sleeper

__all__ = ["ProcessContract", "Started", "make_site", "read_written"]

GONE_S = 60.0  # within which processes are gone; less than the minutes that they would live
START_S = 2.0  # a limit for a start that does not end by itself
SITE = """
import os, sys, time
try:
    os.close(os.open({first!r}, os.O_CREAT | os.O_EXCL))
    with open({pids!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    for _ in range(int({seconds!r} * 100)):
        if os.path.exists({go!r}):
            break
        time.sleep(0.01)
except FileExistsError:
    os._exit(9)
"""
"""What an interpreter runs before anything else: the first one tells its number and waits for a file ``go``,
at most for some seconds, and every other one ends."""

_numbers = itertools.count(1 << 40)  # of requests; the runtime's own are others


class Started:
    """Worker processes that a test starts from the backend itself."""

    def __init__(self, backend: Backend, count: int, **spec: Any) -> None:
        self.backend = backend
        self.deaths: list[tuple[int, Death]] = []
        self.replies = 0
        node, number = backend.nodes()[0].name, next(_numbers)
        self.token, places = backend.reserve([Place(node, {})] * count, False)
        specs = [
            ProcessSpec(
                label=f"raw{number}-{at}", rank=at, place=location, token=self.token, slot=at, threads=1, **spec
            )
            for at, location in enumerate(places)
        ]
        try:
            self.handles = backend.start_processes(specs, lambda rank, death: self.deaths.append((rank, death)))
        except BaseException:
            backend.release(self.token)
            raise

    def ask(self, rank: int, method: str, **values: Any) -> Future[Reply]:
        """Send a request to the process itself. A second reply counts, and is not in the future."""
        future: Future[Reply] = Future()

        def note_done(reply: Reply) -> None:
            self.replies += 1
            if not future.done():
                future.set_result(reply)

        request = Request(next(_numbers), "", method, self.backend.pack(values, 1))
        self.handles[rank].invoke(request, note_done)
        return future

    def answer(self, rank: int, method: str, **values: Any) -> Any:
        """Send a request, and wait for the value of its reply."""
        future = self.ask(rank, method, **values)
        self.backend.wait(future.done, LIMIT_S)
        reply = future.result(LIMIT_S)
        assert reply.status == "ok"
        return self.backend.unpack(reply.payload)

    def close(self) -> None:
        """End the processes."""
        for handle in self.handles:
            handle.kill()
        self.backend.release(self.token)


class ProcessContract:
    @pytest.fixture
    @classmethod
    def backend(cls, cluster: Cluster) -> Backend:
        return cluster._backend  # pyright: ignore[reportPrivateUsage] - the point: what stands below the runtime

    # -- nodes and reservations --------------------------------------------------------------------------------------

    def test_nodes_have_a_stable_order_and_names_of_their_own(self, backend: Backend) -> None:
        names = [node.name for node in backend.nodes()]
        assert names
        assert len({*names}) == len(names)
        for _ in range(5):
            assert [node.name for node in backend.nodes()] == names
        assert all(node.resources.get("cpu", 0) >= 1 for node in backend.nodes())

    def test_what_is_expected_without_a_start_is_what_there_is(self, target: Target, backend: Backend) -> None:
        cls = backend_class(target.backend, target.options)
        expected = cls.expected_nodes(target.options)
        assert not expected or [(n.name, n.resources) for n in expected] == [
            (n.name, n.resources) for n in backend.nodes()
        ]
        assert isinstance(backend.capabilities, Capabilities)

    def test_a_reservation_has_the_places_asked_for_and_a_token_that_pickles(self, backend: Backend) -> None:
        node = backend.nodes()[0].name
        asked = [Place(node, {"cpu": 0.25}), Place(node, {"cpu": 0.5})]
        token, places = backend.reserve(asked, False)
        assert [(location.node, location.resources) for location in places] == [
            (node, {"cpu": 0.25}),
            (node, {"cpu": 0.5}),
        ]
        pickle.loads(pickle.dumps(token))
        backend.release(token)

    def test_a_reservation_that_cannot_be_had_holds_nothing(self, backend: Backend) -> None:
        """As where another controller was first. A backend that leaves the counting to the runtime refuses nothing."""
        node = backend.nodes()[0]
        whole_node = Place(node.name, {"cpu": node.resources["cpu"]})
        try:
            token, _ = backend.reserve([whole_node, whole_node], False)
        except PlacementError:
            token, _ = backend.reserve([whole_node], False)
        backend.release(token)

    def test_a_rendezvous_is_a_new_one_each_time(self, cluster: Cluster, backend: Backend) -> None:
        need(cluster, "collectives")
        started = Started(backend, 2)
        try:
            assert len({backend.rendezvous(started.handles) for _ in range(3)}) == 3
        finally:
            started.close()

    def test_devices_of_a_slot_and_no_others_are_visible(
        self, target: Target, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        need(cluster, "processes")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
        with podium.connect(target.backend, hints={"preload": ()}, **target.options) as other:
            if other.nodes[0].resources.get("gpu", 0) != 3:
                pytest.skip("the backend does not count the devices of CUDA_VISIBLE_DEVICES")
            seen = [
                sorted(other.start(Worker.bind(), pool, distributed=False).group.run(read_devices))
                for pool in (other.pool([2], gpus=1), other.pool([1]), other.pool([2], gpus=0.5))
            ]
        assert seen == [[((0,), "4"), ((0,), "6")], [((), "")], [((0,), "7"), ((0,), "7")]]

    # -- start -------------------------------------------------------------------------------------------------------

    def test_every_rank_has_a_process_of_its_own_whose_number_is_known(self, cluster: Cluster) -> None:
        group = cluster.start(Worker.bind(), cluster.pool([3]), distributed=False).group
        if cluster.capabilities.processes:
            assert group.run(read_pid) == list(group.pids)
            assert len({os.getpid(), *group.pids}) == 4
        else:
            assert group.pids == (0, 0, 0)

    def test_a_worker_computes_with_the_threads_of_its_slot(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        pool = cluster.pool([1], cpus=1)
        group = cluster.start(Worker.bind(), pool, distributed=False).group
        assert group.run(read_threads) == [(1, 1)]
        group.close()
        cluster.release(pool)

    def test_a_worker_works_where_the_controller_does(
        self, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "found_by_path.py").write_text("FOUND = 'here'\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.chdir(tmp_path)
        group = cluster.start(Worker.bind(), distributed=False).group
        assert group.run(read_surroundings) == [(os.getcwd(), "here")]

    def test_any_thread_may_start_and_close(self, cluster: Cluster) -> None:
        done: list[list[int]] = []

        def live() -> None:
            counter = cluster.start(Counter.bind(2), cluster.pool([2]), distributed=False)
            done.append(counter.add(1))
            counter.group.close()

        thread = threading.Thread(target=live)
        thread.start()
        thread.join()
        assert done == [[3, 3]]

    def test_if_one_process_does_not_start_none_is_left(self, cluster: Cluster, tmp_path: Path) -> None:
        """The environment is there before anything is imported, or the interpreter would not run its site."""
        need(cluster, "processes")
        with pytest.raises(WorkerStartError):
            cluster.start(Worker.bind(), cluster.pool([2]), env=make_site(tmp_path, 0.0), start_timeout_s=LIMIT_S)
        wait_for(lambda: bool(read_written(tmp_path)), LIMIT_S)
        assert not all_gone(read_written(tmp_path), GONE_S)

    def test_a_start_ends_at_its_limit_and_leaves_nothing(self, cluster: Cluster, tmp_path: Path) -> None:
        need(cluster, "processes")
        with pytest.raises(WorkerStartError, match=r"limit|deadline|within"):
            cluster.start(Worker.bind(), name="late", env=make_site(tmp_path, 600.0), start_timeout_s=START_S)
        try:  # a runtime that starts processes for others, as Ray does, may wait for one that has not called it yet
            assert not cluster.capabilities.exit_status or not all_gone(read_written(tmp_path), GONE_S)
        finally:
            for pid in read_written(tmp_path):
                kill(pid)
        assert cluster.start(Counter.bind(1), name="late", distributed=False).add(1) == [2]

    # -- requests ----------------------------------------------------------------------------------------------------

    def test_each_request_has_one_reply_with_its_own_value(self, backend: Backend) -> None:
        started = Started(backend, 2)
        try:
            answers = [(at, started.ask(at % 2, "record", record=[at])) for at in range(40)]
            for at, future in answers:
                backend.wait(future.done, LIMIT_S)
                assert backend.unpack(future.result(LIMIT_S).payload) == [at]
            assert (started.replies, started.deaths) == (40, [])
        finally:
            started.close()

    def test_a_result_that_nobody_wants_is_not_sent(self, cluster: Cluster) -> None:
        keeps = cluster.start(KeepsItsResults.bind(), cluster.pool([2]), distributed=False)
        assert keeps.lock_unless_first() == 0, "the results of other ranks are not wanted"
        assert keeps.lock() is None

    def test_times_are_those_of_the_call(self, cluster: Cluster) -> None:
        heard: list[telemetry.Event] = []
        sleeper = cluster.start(Sleeper.bind(), name="timed", distributed=False)
        unsubscribe = telemetry.subscribe(heard.append)
        began = time.monotonic_ns()
        try:
            sleeper.sleep(0.1)
            assert wait_for(lambda: any(isinstance(event, telemetry.CallFinished) for event in heard), LIMIT_S)
        finally:
            unsubscribe()
        ended = time.monotonic_ns()
        (call,) = [event for event in heard if isinstance(event, telemetry.CallFinished) and event.role == "timed"]
        assert began <= call.submitted_ns <= call.started_ns
        assert call.started_ns + 90_000_000 <= call.ended_ns <= ended

    def test_waiting_ends_when_it_is_asked_to(self, cluster: Cluster, backend: Backend) -> None:
        assert backend.wait(lambda: False, 0.2) in (True, False, None)
        assert backend.wait(lambda: True, None) in (True, False, None)
        waits, over = threading.Event(), threading.Event()

        def note_end() -> bool:
            waits.set()
            return over.is_set()

        waiter = threading.Thread(target=backend.wait, args=(note_end, None), daemon=True)
        waiter.start()
        assert wait_for(lambda: waits.is_set() or not waiter.is_alive(), LIMIT_S)
        try:
            assert not (waiter.is_alive() and backend.wait(lambda: False, LIMIT_S)), "one thread delivers for all"
        finally:
            over.set()
            backend.wake()
        waiter.join(LIMIT_S)
        assert not waiter.is_alive()
        need(cluster, "concurrent")
        sleeper = cluster.start(Sleeper.bind(), distributed=False)
        call = sleeper.sleep.submit(60.0)
        caught: list[BaseException] = []
        waiters = [threading.Thread(target=_wait_for_call, args=(call, caught), daemon=True) for _ in range(3)]
        for waiter in waiters:
            waiter.start()
        time.sleep(0.2)
        assert call.cancel()
        for waiter in waiters:
            waiter.join(LIMIT_S)
        assert [type(error) for error in caught] == [CallCancelled] * 3, "those who wait hear it"
        if cluster.capabilities.processes:
            sleeper.group.restart()  # it sleeps for a minute

    # -- ends --------------------------------------------------------------------------------------------------------

    def test_kill_returns_when_the_end_was_reported(self, cluster: Cluster, backend: Backend) -> None:
        need(cluster, "processes")
        started = Started(backend, 2)
        try:
            assert started.answer(1, "record", record="here") == "here"
            assert not any(handle.stopped() for handle in started.handles)
            started.handles[0].kill()
            assert [rank for rank, _ in started.deaths] == [0]
            assert not all_gone([started.handles[0].pid], GONE_S)
            started.handles[0].kill()
            unheard = started.ask(0, "status")
            assert started.answer(1, "record", record="still here") == "still here"
            assert not unheard.done(), "a process that has ended does not answer"
        finally:
            started.close()
        assert sorted(rank for rank, _ in started.deaths) == [0, 1], "each end is reported once"

    def test_what_a_process_started_ends_with_it(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        group = cluster.start(Worker.bind(), cluster.pool([2]), distributed=False).group
        children = group.run(start_child)
        try:
            assert all(alive(pid) for pid in children)
            group.restart()
            assert not all_gone(children, GONE_S)
        finally:
            for pid in children:
                kill(pid)

    def test_replies_that_were_sent_before_an_end_are_heard(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        sleeper = cluster.start(Sleeper.bind(), distributed=False)
        calls = [sleeper.double.submit(at) for at in range(50)]
        if not cluster.capabilities.exit_status:  # a runtime that owns the processes sends replies when it likes
            wait(calls)
        with pytest.raises(WorkerDied):
            sleeper.group.run(leave)
        assert [call.result(LIMIT_S) for call in calls] == [[2 * at] for at in range(50)]

    def test_an_end_is_reported_without_a_call_and_with_its_cause(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        heard: list[telemetry.WorkerLost] = []
        counter = cluster.start(Counter.bind(), cluster.pool([2]), name="idle", distributed=False)
        unsubscribe = telemetry.subscribe(
            lambda event: heard.append(event) if isinstance(event, telemetry.WorkerLost) else None
        )
        try:
            os.kill(counter.group.pids[1], signal.SIGKILL)
            assert wait_for(lambda: bool(heard), LIMIT_S)
        finally:
            unsubscribe()
        assert [(event.role, event.rank) for event in heard] == [("idle", 1)]
        assert heard[0].cause == "signal SIGKILL" or not cluster.capabilities.exit_status

    def test_a_process_that_a_signal_stopped_is_called_so(self, cluster: Cluster) -> None:
        need(cluster, "processes", "concurrent")
        sleeper = cluster.start(Sleeper.bind(), name="held", distributed=False)
        os.kill(sleeper.group.pids[0], signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded, match=r"a signal has stopped process \d+"):
                sleeper.double.within(timeout_s=0.3)(1)
        finally:
            os.kill(sleeper.group.pids[0], signal.SIGCONT)

    def test_closing_the_backend_ends_its_processes_and_may_be_repeated(self, target: Target) -> None:
        cluster = target.connect()
        backend = cluster._backend  # pyright: ignore[reportPrivateUsage] - closed below the runtime
        group = cluster.start(Worker.bind(), cluster.pool([2]), distributed=False).group
        if cluster.capabilities.processes:
            backend.close()
            assert not all_gone(group.pids, GONE_S)
        cluster.close()
        backend.close()


def make_site(directory: Path, seconds: float) -> Mapping[str, str]:
    """The environment of interpreters that run SITE first."""
    files = {name: str(directory / name) for name in ("first", "pids", "go")}
    (directory / "sitecustomize.py").write_text(SITE.format(seconds=seconds, **files))
    return {"PYTHONPATH": os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def read_written(directory: Path) -> list[int]:
    """The numbers of the processes that SITE has told."""
    pids = directory / "pids"
    return [int(line) for line in pids.read_text().split()] if pids.exists() else []


def _wait_for_call(call: Any, caught: list[BaseException]) -> None:
    try:
        call.result()
    except PodiumError as error:
        caught.append(error)
