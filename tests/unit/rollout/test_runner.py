"""Sessions side by side: what each is given, how each ends, and what an end means for the others."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from bench.sessions import make_service
from podium.errors import ConfigError
from podium.rollout.environments import EnvironmentConfig, SessionLimits
from podium.telemetry import Note, subscribe
from podium_agents import Client, ContextFull, Outcome, Reply, Step, Toolbox, converse, tool
from podium_agents.environments import resolve
from podium_agents.environments.processes import SessionProcesses
from podium_agents.environments.resolve import resolve_environment
from podium_agents.environments.runner import Episode, live
from tests.warm_python import run_python

Task = Mapping[str, Any]


def lived(
    play: Callable[[Task, Client], Awaitable[Any]],
    tasks: Sequence[Task] = ({},),
    *,
    time_limit_s: float = 60.0,
    at_once: int = 256,
) -> list[Episode]:
    """A session of each task, with a model that always says the same."""
    names, service = [f"s{number}" for number in range(len(tasks))], make_service()
    service.context = 4096
    return asyncio.run(
        live(
            *(play, tasks, range(len(tasks)), names, service),
            SessionLimits(time_limit_s=time_limit_s, at_once=at_once),
            address=lambda: "",
        )
    )


def test_what_a_session_changes_in_its_task_changes_no_other() -> None:
    row = {"prompt": [{"role": "user", "content": "Which number?"}], "answer": "9"}
    seen: list[int] = []

    async def play(task: Task, client: Client) -> float:
        seen.append(len(task["prompt"]))
        task["prompt"].append((await client.chat(task["prompt"])).message)
        return 1.0

    episodes = lived(play, [dict(row), dict(row), row], at_once=1)
    assert [episode.failure for episode in episodes] == [""] * 3
    assert seen == [1, 1, 1]
    assert len(row["prompt"]) == 1


@pytest.mark.parametrize("how", ["raised", "awaited", "its own task"])
def test_a_cancellation_of_the_sessions_own_making_ends_that_session_alone(how: str) -> None:
    async def play(task: Task, client: Client) -> float:
        await client.chat("Which number?")
        if not task["cancels"]:
            return 1.0
        if how == "raised":
            raise asyncio.CancelledError("gave up")
        if how == "its own task":
            task_of_session = asyncio.current_task()
            assert task_of_session is not None
            task_of_session.cancel()
            await asyncio.sleep(60)
        inner = asyncio.create_task(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(inner.cancel)
        await inner
        return 0.0

    first, second = lived(play, [{"cancels": True}, {"cancels": False}])
    assert first.failure.startswith("CancelledError")
    assert second.failure == ""


def test_a_call_that_is_cancelled_ends_its_sessions() -> None:
    begun = asyncio.Semaphore(0)
    ended: list[str] = []

    async def play(task: Task, client: Client) -> float:
        begun.release()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(client.session_id)
        return 0.0

    async def cancel() -> None:
        limits = SessionLimits(time_limit_s=3600.0)
        living = asyncio.ensure_future(
            live(play, [{}, {}], [0, 1], ["s0", "s1"], make_service(), limits, address=lambda: "")
        )
        for _ in range(2):
            await begun.acquire()
        living.cancel()
        await living

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())
    assert sorted(ended) == ["s0", "s1"]


async def too_long(client: Client) -> None:
    """Say more than the model reads."""
    await client.chat("Which number? " * 1000)


@pytest.mark.parametrize("how", ["itself", "group", "cause", "text", "of an agent"])
def test_a_full_context_is_found_within_other_errors(how: str) -> None:
    async def play(task: Task, client: Client) -> float:
        await client.chat("Which number?")
        if how == "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(too_long(client))
        try:
            await too_long(client.agent("judge") if how == "of an agent" else client)
        except ContextFull as error:
            if how == "cause":
                raise RuntimeError("the agent gave up") from error
            if how == "text":  # as clients of the OpenAI API have it
                raise ExceptionGroup("agents", [ValueError("{'code': 'context_length_exceeded'}")]) from None
            raise
        return 1.0

    (episode,) = lived(play)
    assert (episode.failure, episode.truncated, episode.trajectories[0].score) == ("", True, 0.0)


@pytest.mark.parametrize("how", ["went on", "in its handler", "another model's"])
def test_an_error_that_is_no_full_context_is_a_failure(how: str) -> None:
    async def play(task: Task, client: Client) -> float:
        await client.chat("Which number?")
        if how == "another model's":
            raise KeyError("{'code': 'context_length_exceeded'}, says the judge")
        try:
            await too_long(client)
        except ContextFull as error:
            if how == "in its handler":
                raise KeyError("no such world")  # noqa: B904 - a mistake of the environment
            await client.chat("Shorter.")
            raise KeyError("no such world") from error
        return 1.0

    (episode,) = lived(play)
    assert episode.failure.startswith("KeyError")
    assert not episode.truncated


class Unspeakable(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("never")


async def leave() -> None:
    """End the process."""
    sys.exit(3)


@pytest.mark.parametrize("how", ["no text", "exit in a task", "exit"])
def test_a_session_that_raises_whatever_it_likes_ends_alone(how: str) -> None:
    async def play(task: Task, client: Client) -> float:
        await client.chat("Which number?")
        if task["fine"]:
            await asyncio.sleep(0.1)
            return 1.0
        if how == "no text":
            raise Unspeakable
        if how == "exit":
            sys.exit(3)
        await asyncio.gather(leave(), asyncio.sleep(1))
        return 0.0

    first, second = lived(play, [{"fine": False}, {"fine": True}])
    expected = {
        "no text": "Unspeakable: its text cannot be read: __str__ raises RuntimeError",
        "exit in a task": "RuntimeError: SystemExit: 3",
    }
    assert first.failure == expected.get(how, "SystemExit: 3")
    assert second.failure == ""


@pytest.mark.parametrize("how", ["returns", "goes on", "ends slowly"])
def test_a_session_that_does_not_hear_that_its_time_is_over_has_failed(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podium_agents.environments.runner._GRACE_S", 0.3)
    notes: list[str] = []

    async def play(task: Task, client: Client) -> float:
        for _ in range(2):  # it is cancelled when its time is over, and when the event loop ends
            try:
                await asyncio.sleep(3600)  # who waits for its end passes the time limit of the test
            except asyncio.CancelledError:
                if how == "returns":
                    return 1.0
                if how == "ends slowly":
                    await asyncio.sleep(3600)
                    raise
        return 1.0

    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    try:
        (episode,) = lived(play, time_limit_s=0.2)
    finally:
        unsubscribe()
    assert episode.failure == "time limit"
    assert len([note for note in notes if "abandons the session" in note]) == (how != "returns")


def hang() -> None:
    """Never end."""
    threading.Event().wait()


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def plain(task: Task, client: Client) -> float:
    """Hangs, or has tools most of whose calls hang, more of them than a pool of asyncio has threads."""
    if task["hangs"]:
        hang()
    calls = [{"function": {"name": "hang", "arguments": "{}"}}] * 33
    calls += [{"function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]

    async def use_tools() -> float:
        await client.chat("Which number?")
        answers = await Toolbox([tool(hang, time_limit_s=0.02), add]).answer(calls)
        return float(answers[-1]["content"])

    return asyncio.run(use_tools())


async def to_thread(task: Task, client: Client) -> float:
    """Hangs in a thread of asyncio's, or computes in one."""
    if task["hangs"]:
        await asyncio.to_thread(hang)
    await client.chat("Which number?")
    return await asyncio.to_thread(float, 3)


def live_in_threads(name: str) -> str:
    """How sessions of a function end. The process ends although some of their threads do not.

    On a busy machine the session that does not hang may need a longer limit, too.
    """
    play, ends = resolve_environment(EnvironmentConfig(name=f"{__file__}:{name}")).play, list[str]()
    for time_limit_s in (2.0, 20.0, 60.0):
        episodes = lived(play, [*[{"hangs": True}] * 33, {"hangs": False}], time_limit_s=time_limit_s)
        ends = [str(one.failure or one.trajectories[0].score) for one in episodes]
        if ends[-1] != "time limit":
            break
    return " ".join(dict.fromkeys(ends))


@pytest.mark.slow
def test_threads_that_hang_hold_up_no_other_and_no_end_of_the_process() -> None:
    names = ("plain", "to_thread")
    program = f"from tests.unit.rollout.test_runner import live_in_threads; print(*map(live_in_threads, {names}))"
    ended = run_python("-c", program, timeout=240)
    assert (ended.returncode, ended.stdout.strip()) == (0, "time limit 3.0 time limit 3.0"), ended.stderr


async def play_async(task: Task, client: Client) -> Any:
    """Live a session of the async function that the task names."""
    return await globals()[task["plays"]](task, client)


def play_plain(task: Task, client: Client) -> Any:
    """Live a session of the plain function that the task names."""
    return globals()[task["plays"]](task, client)


@pytest.fixture(scope="module")
def processes() -> Iterator[Mapping[bool, SessionProcesses]]:
    """Sessions in processes: of plain functions, and of async ones."""
    functions = {False: play_plain, True: play_async}
    found = {
        is_async: SessionProcesses(EnvironmentConfig(name=f"{__file__}:{function.__name__}"))
        for is_async, function in functions.items()
    }
    yield found
    for one in found.values():
        one.close()


@pytest.fixture(params=["here", "in processes"])
def live_function(request: pytest.FixtureRequest) -> Callable[..., list[Episode]]:
    """Lives sessions of a function of this module, in this process or in others."""

    def live_one(function: Callable[..., Any], count: int = 1) -> list[Episode]:
        tasks = [{"plays": function.__name__}] * count
        if request.param == "here":
            return lived(resolve_environment(EnvironmentConfig(name=f"{__file__}:{function.__name__}")).play, tasks)
        in_processes = request.getfixturevalue("processes")
        return lived(in_processes[asyncio.iscoroutinefunction(function)].play, tasks)

    return live_one


async def scored_by_numpy(task: Task, client: Client) -> Outcome:
    """Rewards as environments with arrays have them."""
    await client.agent("judge").chat("Which number?")
    await client.chat("Which number?")
    client.reward(np.float32(0.25))  # type: ignore[arg-type]
    scores: Any = {"half": np.float32(0.5), "two": np.int64(2)}
    return Outcome(score=scores["half"], parts={**scores}, agents={"judge": scores["two"]})


def test_numbers_of_numpy_are_rewards(live_function: Callable[..., list[Episode]]) -> None:
    (episode,) = live_function(scored_by_numpy)
    assert episode.failure == "", episode.details
    own, judge = episode.trajectories
    found = [own.score, judge.score, *own.turn_rewards.values(), *episode.parts.values()]
    assert found == [0.5, 2.0, 0.25, 0.5, 2.0]
    assert {type(number) for number in found} == {float}


async def rewards_the_first(task: Task, client: Client) -> float:
    """Knows only later what an earlier answer was worth."""
    judge = client.agent("judge")
    first, other = await client.chat("Which number?"), await judge.chat("Is it?")
    second = await client.chat("And now?")
    client.reward(0.5, first)
    client.reward(0.25, first)
    client.reward(2.0)
    client.reward(1.0, second)
    judge.reward(4.0, other)
    for wrong in (other, Reply({"role": "assistant"}, "stop")):
        with pytest.raises(ValueError, match="does not come from this client"):
            client.reward(1.0, wrong)
    return 0.0


def test_an_earlier_answer_can_be_rewarded(live_function: Callable[..., list[Episode]]) -> None:
    (episode,) = live_function(rewards_the_first)
    assert episode.failure == "", episode.details
    assert [dict(one.turn_rewards) for one in episode.trajectories] == [{0: 0.75, 1: 3.0}, {0: 4.0}]


def look(place: str) -> str:
    """Look at a place."""
    return place


async def two_agents_of_one_list(task: Task, client: Client) -> float:
    """Hands the same conversation to two agents."""
    messages = [{"role": "user", "content": "Which number?"}]
    first = await converse(client.agent("first"), messages, tools=[look])
    second = await converse(client.agent("second"), messages, tools=[look])
    assert messages == [{"role": "user", "content": "Which number?"}]
    for reply in (first, second):
        assert reply.messages == [*messages, reply.message]
    assert (await client.chat("And now?")).messages[0] == {"role": "user", "content": "And now?"}
    return 0.0


def test_a_conversation_that_is_given_to_two_agents_stays_as_it_is(live_function: Callable[..., list[Episode]]) -> None:
    (episode,) = live_function(two_agents_of_one_list)
    assert episode.failure == "", episode.details
    prompts = [[one.session.rows[0].ids[: one.session.rows[0].turns[0].start]] for one in episode.trajectories]
    assert prompts[1] == prompts[2]


def half(n: int) -> int:
    """Halve an even number."""
    if n % 2:
        raise ValueError("odd")
    return n // 2


async def own_loop(task: Task, client: Client) -> float:
    """Answers tool calls itself, four of them, of which two fail."""
    box = Toolbox([half])
    calls = [{"function": {"name": "half", "arguments": f'{{"n": {n}}}'}} for n in (1, 2)]
    await client.chat("Which number?", tools=box.schemas)
    await box.answer(calls)
    await asyncio.gather(*(box.answer([call]) for call in calls))
    return 1.0


def own_loop_in_a_thread(task: Task, client: Client) -> float:
    """The same, with an event loop of its own."""
    return asyncio.run(own_loop(task, client))


@pytest.mark.parametrize("function", [own_loop, own_loop_in_a_thread])
def test_calls_of_tools_are_counted_in_a_loop_of_the_sessions_own(
    function: Callable[..., Any], live_function: Callable[..., list[Episode]]
) -> None:
    episodes = live_function(function, 2)
    assert [one.failure for one in episodes] == ["", ""], episodes
    assert [dict(one.counts) for one in episodes] == [{"tool_calls": 4, "tool_errors": 2}] * 2


class Server:
    """Needs what is not there, when it is made."""

    def __init__(self) -> None:
        raise OSError("no license")

    async def play(self, task: Task, client: Client) -> float:
        """Never begins."""
        return 0.0


def serve() -> Server:
    """Make one."""
    return Server()


@pytest.mark.parametrize("name", ["Server", "serve"])
def test_what_an_environment_raises_when_it_is_made_is_said_with_the_statement(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"environment.name = .*:{name}': .*test_runner\.py:\d+: OSError: no license"
    ):
        resolve_environment(EnvironmentConfig(name=f"{__file__}:{name}"))


class Endless:
    """A game that never says that it is over, and pays at each turn."""

    def reset(self, task: Task) -> str:
        """Begin."""
        return "Which number?"

    def step(self, answer: str) -> Step:
        """Ask again."""
        return Step(say="And now?", reward=0.5)


class Bounded(Endless):
    """The same with as many turns as it says."""

    max_turns = 3


def test_a_game_that_is_not_over_ends_where_it_says_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_MOST_TURNS", 4)
    endings = dict[str, Episode]()
    for name in ("Endless", "Bounded"):
        (endings[name],) = lived(resolve_environment(EnvironmentConfig(name=f"{__file__}:{name}")).play)
    assert "Endless is not over after 4 answers: return Step(done=True)" in endings["Endless"].failure
    (trajectory,) = endings["Bounded"].trajectories
    assert (endings["Bounded"].failure, dict(trajectory.turn_rewards)) == ("", {0: 0.5, 1: 0.5, 2: 0.5})


async def raises(task: Task, client: Client) -> float:
    """Raises in a function of its own."""
    return refuse(client)


def raises_in_a_thread(task: Task, client: Client) -> float:
    """The same, in a thread."""
    return refuse(client)


def refuse(client: Client) -> float:
    """Let the client raise."""
    client.reward(1.0)
    return 0.0


@pytest.mark.parametrize("name", ["raises", "raises_in_a_thread"])
def test_a_traceback_begins_with_the_sessions_own_code(name: str) -> None:
    (episode,) = lived(resolve_environment(EnvironmentConfig(name=f"{__file__}:{name}")).play)
    head, first, *rest = episode.details.splitlines()
    assert (head, first.endswith(f"in {name}")) == ("Traceback (most recent call last):", True), episode.details
    assert f'File "{__file__}"' in first
    assert any("client.py" in line for line in rest)  # what comes after stays, although it is Podium's
    assert rest[-1] == episode.failure


@pytest.mark.parametrize("returned", ["1.0", float("nan"), {"points": 1.0}, [1.0], (1.0, {}), 1j, {"score": [1.0]}])
def test_a_wrong_reward_needs_no_traceback(returned: Any) -> None:
    async def play(task: Task, client: Client) -> Any:
        return returned

    (episode,) = lived(play)
    assert "the environment returned" in episode.failure
    assert episode.details == ""


def does_not_wait(task: Task, client: Client) -> float:
    """Takes a coroutine for an answer."""
    reply: Any = client.chat("Which number?")
    return float(reply.text)


async def does_not_wait_either(task: Task, client: Client) -> float:
    """Takes a coroutine for a conversation."""
    reply: Any = converse(client, [])
    return float(reply.text)


@pytest.mark.parametrize(("function", "called"), [(does_not_wait, "client.chat"), (does_not_wait_either, "converse")])
def test_who_does_not_wait_for_an_answer_is_told_how(
    function: Callable[..., Any], called: str, live_function: Callable[..., list[Episode]]
) -> None:
    (episode,) = live_function(function)
    assert "'coroutine' object has no attribute 'text'; " in episode.failure
    assert f"`await {called}(...)`, or `asyncio.run({called}(...))` in a plain function" in episode.failure
