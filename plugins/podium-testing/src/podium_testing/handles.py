"""Contract: a worker that is given the handle of a group calls its endpoints as the script does."""

import os
import signal
from typing import Any

import pytest
import torch

from podium.data import TensorRef
from podium.errors import ConfigError, DeadlineExceeded, EndpointError, SerializationError, WorkerDied
from podium.runtime import Cluster, Handle
from podium_testing.shipped import (
    FarFromScript,
    ask_echo,
    begin_note,
    make_locks,
    make_two_values,
    make_values_of_three_ranks,
    note_in_order,
    read_cause,
    read_helper,
    scatter_on_one,
)
from podium_testing.target import need, refuses, started
from podium_testing.values import make_batch, same_batch
from podium_testing.workers import Agent, Probe, Rows, Sleeper, Stash

__all__ = ["HandleContract"]


class HandleContract:
    asked = started(Probe.bind(bias=2.0), 2, name="asked", distributed=False)
    kept = started(Stash.bind(), 2, name="kept", distributed=False)
    slow = started(Sleeper.bind(), 1, name="slow", distributed=False)

    @pytest.fixture(scope="class")
    @classmethod
    def agent(cls, cluster: Cluster, asked: Handle[Probe]) -> Any:
        return cluster.start(Agent.bind(asked), cluster.pool(2), name="agent", distributed=False)

    def test_a_worker_calls_with_the_endpoints_own_dispatch_and_collect(
        self, cluster: Cluster, agent: Handle[Agent], asked: Handle[Probe]
    ) -> None:
        assert agent.ask("rank") == [[0, 1]] * 2
        assert agent.ask("echo_once", values=["x"]) == ["x"] * 2
        assert agent.ask("silent") == [None] * 2
        assert agent.ask("spread") == [2.0] * 2
        assert agent.ask("rank", handle=asked.group.on([1, 0])) == [[1, 0]] * 2
        rows = cluster.start(Rows.bind(), cluster.pool(3), name="asked_rows", distributed=False)
        batch = make_batch([3, 1, 4, 1, 5])
        for method in ("same", "same_by_tokens", "same_padded"):
            assert all(same_batch(got, batch) for got in agent.ask(method, handle=rows, values=[batch]))
        asks_rows = cluster.start(Agent.bind(rows), distributed=False)
        for pad, parts in ((True, [[1, 1], [2, 2], [3, 4]]), (False, [[1], [2], [3, 4]])):
            assert asks_rows.ask_padded("padded", [1, 2, 3, 4], pad) == [parts]
        assert agent.begin("echo_once", 5) == [5, 5], "a call that a worker returns is waited for"
        assert agent.group.run(scatter_on_one) == [[(1, 7, "-")]] * 2

    def test_a_handle_comes_back_as_the_one_that_was_given(self, agent: Handle[Agent], asked: Handle[Probe]) -> None:
        handle, _ = agent.group.run(read_helper)
        assert handle.group is asked.group
        assert handle.rank() == [0, 1]

    def test_many_calls_are_awaited_at_once_and_each_callers_order_is_kept(
        self, agent: Handle[Agent], slow: Handle[Sleeper]
    ) -> None:
        assert agent.ask_many("echo_once", list(range(50))) == [list(range(50))] * 2
        agent.group.run(note_in_order, slow, 40)
        (history,) = slow.history()
        for rank in range(2):
            assert [label for label in history if label.startswith(f"{rank}:")] == [f"{rank}:{at}" for at in range(40)]

    def test_errors_are_those_of_the_call(self, agent: Handle[Agent]) -> None:
        says = r"agent\.ask raised EndpointError on rank \d of 2(.|\n)*asked\.fail raised KeyError on rank 1 of 2"
        with pytest.raises(EndpointError, match=says) as caught:
            agent.ask("fail", values=[[1], KeyError("the cause")])
        inner = caught.value.__cause__
        assert isinstance(inner, EndpointError)
        assert (inner.method, inner.rank) == ("fail", 1)
        assert agent.group.run(read_cause) == ["KeyError('why')"] * 2
        for make, error, text in (
            (make_two_values, ConfigError, r"asked\.echo\(\) takes 1 positional argument and got 2"),
            (make_values_of_three_ranks, ConfigError, r"asked\.echo: argument 'value' is per_rank"),
            (make_locks, SerializationError, r"asked\.echo: .*'value' \(lock\)"),
        ):
            with pytest.raises(EndpointError, match=text) as caught:
                agent.group.run(ask_echo, make)
            assert isinstance(caught.value.__cause__, error)
        assert agent.ask("rank") == [[0, 1]] * 2

    def test_an_argument_that_the_script_cannot_read_is_an_error_of_its_call(
        self, cluster: Cluster, agent: Handle[Agent]
    ) -> None:
        need(cluster, "processes")
        for _ in range(2):
            with pytest.raises(EndpointError, match="not for the script") as caught:
                agent.group.run(ask_echo, FarFromScript(os.getpid()).made)
            assert isinstance(caught.value.__cause__, SerializationError)
        assert agent.ask("rank") == [[0, 1]] * 2

    def test_deadlines_hold(self, agent: Handle[Agent], slow: Handle[Sleeper]) -> None:
        says = r"slow\.sleep (passed its|took longer than its) deadline of 0\.2 s"
        with pytest.raises(EndpointError, match=says) as caught:
            agent.ask("sleep", handle=slow, timeout_s=0.2, values=[1.0])
        assert isinstance(caught.value.__cause__, DeadlineExceeded)
        assert agent.ask("double", handle=slow, values=[2]) == [[4]] * 2

    def test_references_go_and_come(self, cluster: Cluster, kept: Handle[Stash]) -> None:
        agent = cluster.start(Agent.bind(kept), name="keeper_of_refs", distributed=False)
        ((kind, total, ref),) = agent.keep_rows(30)
        assert (kind, total) == ("TensorRef", [30_000.0, 30_000.0])
        assert type(ref) is TensorRef
        assert torch.equal(ref.get(), torch.ones(30, 1000))
        assert agent.tensor_total(50) == [[50_000.0, 50_000.0]]

    def test_the_group_stays_with_the_script(self, cluster: Cluster, agent: Handle[Agent]) -> None:
        need(cluster, "processes")
        for name in ("restart", "close", "run"):
            refuses(EndpointError, rf"asked\.group\.{name} is only available in the script", agent.reach, name)
        assert agent.reach("world_size") == [2, 2]

    def test_a_worker_that_would_wait_for_itself_is_refused(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        agent = cluster.start(Agent.bind(), name="itself", distributed=False)
        says = r"itself\.ask: a worker of the same processes called it and would wait for itself"
        refuses(EndpointError, says, agent.ask, "ask", handle=agent, values=["rank"])
        sleeper = cluster.start(Sleeper.bind(), into=agent, name="neighbor")
        assert agent.ask("peek", handle=sleeper) == [[[]]], "a concurrent endpoint runs beside the caller"

    def test_a_caller_that_dies_takes_its_calls_with_it(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        sleeper = cluster.start(Sleeper.bind(), cluster.pool(2), name="busy_ones", distributed=False)
        agent = cluster.start(Agent.bind(sleeper), name="dying", distributed=False)
        busy = sleeper.wait_for_event.submit(60.0)
        agent.group.run(begin_note)
        agent.ask("peek")  # by now the note waits behind the busy call
        os.kill(agent.group.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            agent.ask("peek")
        sleeper.set_event()  # which waits until both ranks have heard that the note is cancelled
        assert busy.result() == [True, True]
        assert sleeper.history() == [[], []]
        agent.group.restart()
        assert agent.ask("double", values=[3]) == [[6, 6]], "its constructor was given the handle again"

    def test_a_group_that_restarts_is_reached_again(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        target = cluster.start(Probe.bind(), name="restarting", distributed=False)
        agent = cluster.start(Agent.bind(target), distributed=False)
        os.kill(target.group.pids[0], signal.SIGKILL)
        with pytest.raises(EndpointError, match="restarting") as caught:
            agent.ask("rank")
        assert isinstance(caught.value.__cause__, WorkerDied)
        target.group.restart()
        assert agent.ask("rank") == [[0]]
        target.group.close()
        refuses(EndpointError, "restarting is closed", agent.ask, "rank")
