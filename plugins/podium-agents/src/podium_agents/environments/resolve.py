"""Resolve the name of an environment to a coroutine function that runs one session."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from podium.errors import ConfigError
from podium.functions import explain_raised, nearest
from podium.rollout.environments import EnvironmentConfig, SessionLimits, load_environment
from podium_agents.environments.calls import in_thread
from podium_agents.environments.contract import Outcome, Reward, Step, Task
from podium_agents.environments.outside import Outside, is_outside

if TYPE_CHECKING:
    from podium_agents.environments.client import Client, Reply
    from podium_agents.environments.tools import Toolbox

__all__ = ["Play", "ResolvedEnvironment", "converse", "longest_session_s", "resolve_environment"]

Play = Callable[[Task, "Client"], Awaitable[Reward]]
_KEY = "environment.name"
_PLACES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
_MOST_TURNS = 100  # of an environment that does not say how many it has


@dataclass(frozen=True)
class ResolvedEnvironment:
    """An environment that is ready to be lived in.

    Attributes:
        play: Lives one session.
        tasks: Returns the rows of a split, where the environment has its own.
        outside: The settings of sessions that a service elsewhere lives; None for other environments.
    """

    play: Play
    tasks: Callable[[Literal["train", "test"]], Sequence[Task]] | None = None
    outside: Outside | None = None


def resolve_environment(config: EnvironmentConfig) -> ResolvedEnvironment:
    """Return the environment that ``config`` names.

    Raises:
        ConfigError: The name does not exist or is not an environment; an option is unknown; or its module or factory
            raised an exception.
    """
    environment = load_environment(config.name)
    subject, options = f"{_KEY} = {config.name!r}", config.own_options
    if not inspect.isclass(environment) and _takes_session(environment):
        _check_options(environment, options, subject, given=2)
        return ResolvedEnvironment(_as_play(environment, options))
    _check_options(environment, options, subject, given=0, is_maker=inspect.isfunction(environment))
    make = partial(environment, **options)
    with explain_raised(subject, __file__):
        sample: Any = environment if inspect.isclass(environment) else make()
    if callable(getattr(sample, "play", None)):
        with explain_raised(subject, __file__):
            world: Any = make() if inspect.isclass(sample) else sample
        outside = world if isinstance(world, Outside) else None
        if outside and config.limits.processes:
            raise ConfigError(f"environment.options.processes has no use with {subject}: set it to 0, or leave it out")
        return ResolvedEnvironment(_as_play(world.play, {}), _tasks(world, options), outside)
    if callable(getattr(sample, "reset", None)) and callable(getattr(sample, "step", None)):
        return ResolvedEnvironment(partial(_episode, make), _tasks(sample, options))
    raise ConfigError(
        f"{subject} is no environment: expected an async function of (task, client), a class with reset and step, or a "
        "function that makes an object with one of these"
    )


def longest_session_s(config: EnvironmentConfig) -> float:
    """Return how long a session may last in seconds: its time limit, and what a service elsewhere may take beside."""
    return config.limits.time_limit_s + (Outside(**config.own_options).waits_s if is_outside(config) else 0.0)


async def converse(
    client: Client,
    messages: Sequence[Mapping[str, Any]],
    tools: Toolbox | Sequence[Any] = (),
    *,
    max_turns: int = 10,
) -> Reply:
    """Let the model answer and run the tools that it calls, until an answer calls none. Returns the last answer, whose
    ``messages`` are the whole conversation.

    Args:
        client: The session.
        messages: The conversation so far, which is not changed.
        tools: Tools of the model: typed functions, or a :class:`Toolbox`.
        max_turns: The most answers of the model. Tools that the last answer calls are not run.
    """
    reply, _ = await _converse(client, messages, _toolbox(tools), max_turns)
    return reply


async def _converse(
    client: Client, messages: Sequence[Mapping[str, Any]], box: Toolbox | None, most: int
) -> tuple[Reply, int]:
    """As :func:`converse`. Returns also the number of answers. The last answer has calls that were not run only if it
    is the last of ``most``."""
    for turn in itertools.count(1):
        reply = await client.chat(messages, tools=box.schemas if box else ())
        if box is None or not reply.tool_calls or turn >= most:
            return reply, turn
        messages = [*reply.messages, *await box.answer(reply.tool_calls)]
    raise AssertionError("a conversation ends with an answer")


def _toolbox(tools: Any) -> Toolbox | None:
    if not tools:
        return None
    from podium_agents.environments.tools import Toolbox

    return tools if isinstance(tools, Toolbox) else Toolbox([*tools])


def _takes_session(function: Callable[..., Any]) -> bool:
    """Whether a function runs a session: its first parameters take a task and a client."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return False
    places = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return inspect.iscoroutinefunction(function) or [parameter.name for parameter in places[:2]] == ["task", "client"]


def _as_play(function: Callable[..., Any], options: Mapping[str, Any]) -> Play:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return partial(function, **options)

    async def play(task: Task, client: Client) -> Reward:
        result = await in_thread(function, task, client, **options)
        return await result if inspect.isawaitable(result) else result

    return play


async def _episode(make: Callable[[], Any], task: Task, client: Client) -> Reward:
    """Live a session of an environment with ``reset`` and ``step``."""
    from podium_agents.environments.client import to_messages

    world = await in_thread(make)
    box = _toolbox(getattr(world, "tools", None) or ())
    most, parts = getattr(world, "max_turns", None), dict[str, float]()
    conversation: list[Mapping[str, Any]] = [*to_messages(await _call(world.reset, task))]
    left = _MOST_TURNS if most is None else int(most)
    while left > 0:
        reply, count = await _converse(client, conversation, box, left)
        left -= count
        if reply.tool_calls:  # nothing is left, and an answer that is only begun is none for the environment
            continue
        step = await _call(world.step, reply.text)
        if not isinstance(step, Step):
            raise TypeError(f"{type(world).__name__}.step returned {type(step).__name__}; expected podium's Step")
        if step.reward:
            client.reward(step.reward)
        parts |= step.parts
        if step.done or not step.say:
            break
        conversation = [*reply.messages, *to_messages(step.say)]
    else:
        if most is None:
            name = type(world).__name__
            raise RuntimeError(
                f"{name} is not over after {_MOST_TURNS} answers: return Step(done=True) where a session ends, or set "
                f"{name}.max_turns to the most answers of a session, after which it ends with the rewards that it has"
            )
    return Outcome(score=0.0, parts=parts)


async def _call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method that may block, in a thread, or one that is a coroutine function."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    return await in_thread(method, *arguments)


def _check_options(
    found: Callable[..., Any], options: Mapping[str, Any], subject: str, *, given: int, is_maker: bool = False
) -> None:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return
    places = [parameter.kind for parameter in signature.parameters.values() if parameter.kind in _PLACES]
    if len(places) < given and inspect.Parameter.VAR_POSITIONAL not in places:
        raise ConfigError(f"{subject}: a session is play(task, client, **options); yours takes {signature}")
    try:
        signature.bind(*[None] * given, **options)
    except TypeError as error:
        option_names = [*signature.parameters][given:]
        takes = f"its options are {', '.join(option_names)}" if option_names else "it takes none of its own"
        limits = [*SessionLimits.__dataclass_fields__]
        near = [
            hint for name in options if name not in option_names and (hint := nearest(name, [*option_names, *limits]))
        ]
        if is_maker and not options:
            raise ConfigError(
                f"{subject} is treated as a function that makes an environment, but cannot be called without "
                f"arguments: {error}; a plain function that runs a session must name its first parameters task and "
                f"client; yours takes {signature}"
            ) from None
        raise ConfigError(
            f"{subject}: environment.options do not fit: {error}; {takes}, and every environment also takes "
            f"{', '.join(limits)}{''.join(near[:1])}"
        ) from None


def _tasks(world: Any, options: Mapping[str, Any]) -> Any:
    """The function that returns the tasks of ``world``, with the options that it has parameters for; None if none."""
    tasks = getattr(world, "tasks", None)
    return partial(tasks, **_accept(tasks, options)) if callable(tasks) else None


def _accept(function: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that a function of a split has parameters for, beside that of the split."""
    try:
        option_names = [*inspect.signature(function).parameters][1:]
    except (TypeError, ValueError):
        return {}
    return {name: value for name, value in options.items() if name in option_names}
