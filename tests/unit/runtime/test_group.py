"""Handles of colocated workers, and of groups of another controller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

import podium
from podium import Cluster, Worker, colocate, endpoint
from podium.backends.inline import InlineBackend
from podium.errors import ConfigError, WorkerDied
from podium.runtime import Capabilities, Death, ProcessHandle, Reply, Request
from podium.runtime.messages import OnDeath
from tests.waits import LONG_S


class Named(Worker):
    @endpoint
    def role(self) -> str:
        return self.ctx.role


@pytest.mark.parametrize("name", ["values", "items", "keys", "get", "__len__", "__dict__"])
def test_a_name_that_the_mapping_of_handles_needs_itself_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be named '{name}'"):
        colocate(**{"actor": Named.bind(), name: Named.bind()})


def test_handles_are_found_as_attributes_and_as_a_mapping() -> None:
    with podium.connect("inline") as cluster:
        both = cluster.start(colocate(actor=Named.bind(), _critic=Named.bind()), distributed=False)
        assert list(both) == ["actor", "_critic"]
        assert [handle.role() for handle in both.values()] == [["actor"], ["_critic"]]
        assert both["actor"] is both.actor
        assert both._critic is both["_critic"]
        with pytest.raises(AttributeError, match=r"no worker 'policy' here; there are \['_critic', 'actor'\]"):
            both.policy  # noqa: B018 - it raises


class Gate(Worker):
    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()

    @endpoint
    def pass_in_order(self) -> bool:
        self.begun.set()
        return self.opened.wait(LONG_S)

    @endpoint(concurrent=True)
    def pass_beside(self) -> bool:
        return self.pass_in_order()

    @endpoint(concurrent=True)
    def open(self) -> None:
        assert self.begun.wait(LONG_S)
        self.opened.set()


@pytest.mark.parametrize("method", ["pass_in_order", "pass_beside"])
def test_inline_a_concurrent_call_does_not_wait_for_one_that_another_thread_runs(method: str) -> None:
    with podium.connect("inline") as cluster, ThreadPoolExecutor(1) as threads:
        gate = cluster.start(Gate.bind())
        passed = threads.submit(getattr(gate, method))
        gate.open()
        assert passed.result() == [True]


class Dying(ProcessHandle):
    """A process that ends when it is asked for something."""

    def __init__(self, on_death: OnDeath) -> None:
        self.on_death = on_death

    def invoke(self, request: Request, done: Callable[[Reply], None]) -> None:
        self.on_death(0, Death("signal SIGKILL"))

    def kill(self) -> None: ...


class OneDetached(InlineBackend):
    capabilities = Capabilities(processes=True, collectives=False, concurrent=True, detached=True)

    def attach(self, name: str, on_death: OnDeath) -> Sequence[ProcessHandle]:
        return [Dying(on_death)]


def test_a_detached_process_that_ends_before_it_has_told_its_place_is_reported() -> None:
    backend = OneDetached()
    backend.capabilities = OneDetached.capabilities
    with (
        Cluster(backend) as cluster,
        pytest.raises(WorkerDied, match=r"kept\.attach: rank 0 of kept on an unknown node"),
    ):
        cluster.attach("kept")
