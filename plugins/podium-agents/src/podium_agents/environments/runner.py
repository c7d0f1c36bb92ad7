"""Runs many sessions at the same time, and ends each of them separately.

    task, seed ─▶ open session ─▶ play(task, client) ─▶ close session ─▶ Episode: rows, reward, or why there is none
                        limits of time, and of sessions at once

A session that raises, hangs or fills the model's context has no influence on others. Its reason is kept and counted.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from podium.errors import ContextFull
from podium.exceptions import format_error, name_class, read_text
from podium.telemetry import Note, emit
from podium.telemetry.progress import Counting
from podium_agents.environments.calls import contain_exits, is_cancelled, session_counts
from podium_agents.environments.client import MOST_AGENTS, Client
from podium_agents.environments.contract import Outcome, Reward
from podium_agents.service.budgets import LIMIT_REACHED, Budget

if TYPE_CHECKING:
    from collections.abc import Iterator

    from podium.rollout.environments import SessionLimits
    from podium_agents.environments.contract import Task
    from podium_agents.service.service import Service
    from podium_agents.service.session_recording import Session

__all__ = ["CONTEXT_FULL", "TIME_LIMIT", "Ending", "Episode", "Trajectory", "ending_of", "live"]

TIME_LIMIT: Final = "time limit"
CONTEXT_FULL: Final = "context is full"
_ENDS: Final = ("context_length_exceeded", LIMIT_REACHED)  # codes of requests that are refused at a session's end
_STALL_S: Final = 5.0
_GRACE_S: Final = 5.0  # that a session has to end when it is cancelled
_NOT_OWN: Final = frozenset({"podium", "podium_agents", "asyncio", "concurrent", "threading"})  # they call a session
_CHECKS: Final = frozenset({__name__, "podium_agents.environments.resolve"})  # of what a session returned


@dataclass(frozen=True)
class Trajectory:
    """What one agent said in a session.

    Attributes:
        agent: Its name; "" for the client itself.
        session: The rows.
        score: Its reward beside those of single turns; None where ``reward.name`` is to score the last answer.
        turn_rewards: By number of the call, its own reward.
    """

    agent: str
    session: Session
    score: float | None
    turn_rewards: Mapping[int, float]


@dataclass(frozen=True)
class Ending:
    """How a session ended.

    Attributes:
        outcome: What it earned.
        failure: Why it failed, in one line; "" where it did not.
        details: The traceback of a session that raised.
        truncated: Whether it ended because the model's context was full, or a limit of the session used up.
    """

    outcome: Outcome = field(default_factory=Outcome)
    failure: str = ""
    details: str = ""
    truncated: bool = False


@dataclass(frozen=True)
class Episode:
    """A session that is over.

    Attributes:
        trajectories: What was said, by agent; those without a call are left out.
        parts: Named parts of the reward.
        failure: Why it failed, in one line; "" where it did not. A failed session has no reward.
        details: The traceback of a session that raised.
        truncated: Whether it ended because the model's context was full, or a limit of the session used up.
        seconds: How long it took.
        waited_s: How many of these seconds its turns waited for memory.
        limit: The limit of ``environment.options`` by which it ended, such as "turn_limit"; "" for none.
        counts: What it counted, by name.
    """

    trajectories: Sequence[Trajectory] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    details: str = ""
    truncated: bool = False
    seconds: float = 0.0
    waited_s: float = 0.0
    limit: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)


async def live(
    play: Callable[[Task, Client], Awaitable[Reward | Ending]],
    tasks: Sequence[Task],
    seeds: Sequence[int],
    names: Sequence[str],
    service: Service,
    limits: SessionLimits,
    *,
    address: Callable[[], str],
    key_of: Callable[[str], str] = str,
    room: asyncio.Semaphore | None = None,
    live_outside: Callable[[Client], Awaitable[Any]] | None = None,
) -> list[Episode]:
    """Live a session for each task, and return what became of each, in their order.

    Args:
        play: Lives one session.
        tasks: S tasks.
        seeds: S seeds, from which those of all calls follow.
        names: S names of sessions, no two of them equal.
        service: Answers the calls, and records them.
        limits: Of time, and of sessions at once.
        address: The base of the address of the OpenAI API, which a session may ask for.
        key_of: Returns the key that the agents of a session send there, by the session's name.
        room: What each session holds while it lives, where calls that overlap share their limit of sessions at once.
        live_outside: Offers a session to services elsewhere, and returns how it ended.
    """
    loop = asyncio.get_running_loop()
    slots = room or asyncio.Semaphore(limits.side_by_side)

    async def one(task: Task, seed: int, name: str) -> Episode:
        async with slots:
            session = service.open_session(name, seed, Budget(limits.budget))
            client = Client(service, session, address, key_of(name), seed, loop=loop, live_outside=live_outside)
            began_s = time.monotonic()
            ending = await ending_of(play, task, client, limits.time_limit_s)
            limit = session.budget.reached if ending.truncated else ""
            if limit and not limits.train_at_limit:
                ending = Ending(failure=limit.replace("_", " "))
            waited_s = client.waited_s
            recorded = client.close()
            if unknown := ending.outcome.agents.keys() - {agent for agent, *_ in recorded}:
                ending = Ending(
                    failure=f"the outcome has a reward for the agent {min(unknown)!r}, which is not in the session"
                )
            if len(recorded) > MOST_AGENTS + 1:  # with agents of agents
                ending = Ending(failure=f"more than {MOST_AGENTS} agents")
            count.done += 1
            return Episode(
                [
                    Trajectory(agent, session, ending.outcome.agents.get(agent, ending.outcome.score), rewards)
                    for agent, session, rewards in recorded
                    if session.calls
                ],
                ending.outcome.parts,
                ending.failure,
                ending.details,
                ending.truncated,
                time.monotonic() - began_s,
                waited_s,
                limit,
                sum((Counter(relative.counts) for relative in client.family), Counter()),
            )

    with _watch_loop(), Counting("sessions", len(tasks)) as count:
        return await asyncio.gather(*map(one, tasks, seeds, names))


async def ending_of(
    play: Callable[[Task, Client], Awaitable[Reward | Ending]], task: Task, client: Client, limit_s: float | None = None
) -> Ending:
    """Live a session, and return how it ended. It raises nothing but the caller's own cancellation.

    The session gets a copy of ``task``, since others of the same prompt have the same row of the data.
    """
    contain_exits()
    lived = asyncio.ensure_future(_live_session(play, task, client))  # a session may cancel its own task
    try:
        began_s, left_s = time.monotonic(), limit_s
        while left_s is None or left_s > 0:
            await asyncio.wait({lived}, timeout=left_s)
            if lived.done():
                break
            # The limit does not count the time in which turns wait for memory.
            left_s = None if limit_s is None else limit_s + client.waited_s - (time.monotonic() - began_s)
        in_time = lived.done()
    finally:
        await _end(lived)
    if not in_time:
        details = f"it lasted longer than environment.options.time_limit_s = {limit_s:g}"
        return Ending(failure=TIME_LIMIT, details=details)
    if lived.cancelled():
        return _make_failure(
            asyncio.CancelledError("the session cancelled its own task; raise an exception or return to end a session")
        )
    return lived.result()


async def _end(lived: asyncio.Future[Ending]) -> None:
    """End the task of a session whose time is over. One that does not hear of it is left behind."""
    if lived.done():
        return
    lived.cancel()
    await asyncio.wait({lived}, timeout=_GRACE_S)
    if not lived.done():
        emit(
            Note(
                f"a session still runs {_GRACE_S:g} s after it was cancelled. Podium abandons the session and does "
                "not train on it. Only sessions in processes (environment.options.processes) can be killed"
            )
        )


async def _live_session(
    play: Callable[[Task, Client], Awaitable[Reward | Ending]], task: Task, client: Client
) -> Ending:
    session_counts.set(client.counts)  # for this task alone, and for what it starts
    try:
        outcome: Any = await play(copy.deepcopy(task), client)
        return outcome if isinstance(outcome, Ending) else Ending(_as_outcome(outcome))
    except BaseException as error:  # an environment is a stranger's: SystemExit ends a session, not a run
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        if any(map(_is_full, _causes(error))) and client.full:
            return Ending(Outcome(score=0.0), truncated=True)
        return _make_failure(error)


def _make_failure(error: BaseException) -> Ending:
    what = f"{name_class(error)}: {read_text(error).partition(chr(10))[0][:200]}{_hint(error)}"
    return Ending(failure=what, details=_own_traceback(error))


def _hint(error: BaseException) -> str:
    """What to write where an attribute of an answer was looked for before anybody had waited for the answer."""
    subject = error.obj if isinstance(error, AttributeError) else None
    if not inspect.iscoroutine(subject) or not subject.cr_code.co_filename.startswith(os.path.dirname(__file__)):
        return ""
    subject.close()  # nobody will wait for it, which Python would say besides
    name = {"chat": "client.chat"}.get(subject.__name__, subject.__name__)
    return f"; {name} is a coroutine function: `await {name}(...)`, or `asyncio.run({name}(...))` in a plain function"


def _own_traceback(error: BaseException) -> str:
    """A traceback that begins with the session's own code; "" where Podium refuses what the session returned."""
    step, own_step, name = error.__traceback__, None, ""
    while step is not None:
        name = str(step.tb_frame.f_globals.get("__name__", ""))
        if own_step is None and name.partition(".")[0] not in _NOT_OWN:
            own_step = step
        step = step.tb_next
    if own_step is None and name in _CHECKS:
        return ""
    return format_error(error, own_step or error.__traceback__)


def _is_full(error: BaseException) -> bool:
    """Whether an error says that the context is full, or a limit of the session used up: the client's error, or that of
    an agent which asks over HTTP."""
    if isinstance(error, ContextFull):
        return True
    code = vars(error).get("code") if hasattr(error, "__dict__") else None  # OpenAI's client has it there alone
    return code in _ENDS or any(end in read_text(error) for end in _ENDS)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, those of its group, and those from which it was raised. One that was raised while another was handled
    is another matter."""
    waiting, seen = [error], set[int]()
    while waiting:
        cause = waiting.pop()
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        if isinstance(cause, BaseExceptionGroup):
            waiting += cast("BaseExceptionGroup[BaseException]", cause).exceptions
        waiting += [] if cause.__cause__ is None else [cause.__cause__]


def _as_outcome(reward: Any) -> Outcome:
    """What a session returned, as an outcome of plain numbers. Raises TypeError or ValueError for what is none."""
    if reward is None:
        return Outcome()
    if isinstance(reward, Mapping):
        parts = _numbers(reward)
        if "score" not in parts:
            raise ValueError(f"the environment returned {dict(reward)!r}: a mapping needs the entry 'score'")
        return Outcome(score=parts.pop("score"), parts=parts)
    if isinstance(reward, Outcome):
        score = None if reward.score is None else _number(reward.score, "score")
        return Outcome(score=score, parts=_numbers(reward.parts), agents=_numbers(reward.agents))
    return Outcome(score=_number(reward, "reward"))


def _numbers(given: Mapping[Any, Any]) -> dict[str, float]:
    return {str(name): _number(value, str(name)) for name, value in given.items()}


def _number(value: Any, name: str) -> float:
    try:
        number = float("a text") if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        raise TypeError(f"the environment returned {name} = {repr(value)[:80]}: expected a number") from None
    if number - number != 0.0:
        raise ValueError(f"the environment returned {name} = {value!r}: expected a finite number")
    return number


@contextmanager
def _watch_loop() -> Iterator[None]:
    """Say what blocks the event loop, if anything does for long: all sessions wait for it meanwhile."""
    loop, thread, over = asyncio.get_running_loop(), threading.get_ident(), threading.Event()
    beats = [time.monotonic()]

    def beat() -> None:
        beats[0] = time.monotonic()

    def watch() -> None:
        has_warned = False
        while not over.wait(1.0):
            if time.monotonic() - beats[0] > _STALL_S and not has_warned:
                frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
                stack = "".join(traceback.format_stack(frame, limit=8)) if frame else ""
                emit(
                    Note(
                        f"an environment has blocked all sessions of its process for more than {_STALL_S:g} s: write "
                        "it as a plain function, which runs in a thread, run blocking code by tool(..., "
                        "process=True), or run sessions in processes by environment.options.processes\n" + stack
                    )
                )
                has_warned = True
            try:
                loop.call_soon_threadsafe(beat)
            except RuntimeError:
                return

    watcher = threading.Thread(target=watch, name="podium-sessions", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
