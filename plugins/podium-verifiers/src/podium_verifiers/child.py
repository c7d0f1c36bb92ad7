"""Live episodes of verifiers, in a Python environment of its own. ``environment.py`` runs this file as a script.

    python -P child.py tasks SETTINGS    prints the tasks as one line of JSON
    python -P child.py live SETTINGS     answers the requests for episodes that come through standard input, a socket

A message is a frame of podium.processes: number, length, JSON. One without JSON takes back what was asked for.

It imports nothing of Podium. ``-P`` keeps this directory off the path.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

KEY = "PODIUM_SESSION_KEY"
NUMBERS = itertools.count()
HEADER = struct.Struct("<QQ")


def load(settings: dict[str, Any]) -> Any:
    """Return the environment that the settings name."""
    from verifiers.v1 import Env, EnvConfig  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.generic import concrete_type  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.loaders import environment_class, load_environment  # pyright: ignore[reportMissingImports]

    values = {"taskset": {"id": settings["taskset"], **settings["taskset_config"]}, **settings["config"]}
    env_class = environment_class(settings["taskset"], values.get("id", ""))
    env = load_environment((concrete_type(env_class, EnvConfig, origin=Env) or EnvConfig).model_validate(values))
    if where := next(find_retries(env.config.model_dump()), None):
        raise ValueError(
            f"environment.options.config.{where} repeats failed episodes, and the answers of the abandoned ones "
            "would be trained with the reward of the last one: set it to 0, because Podium counts failed sessions"
        )
    return env


def find_retries(config: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the keys by which a configuration asks for whole episodes to be begun again."""
    for name, value in config.items():
        if not isinstance(value, dict):
            continue
        if name == "retries":
            if value.get("max_retries") or any(rule.get("max_retries") for rule in value.get("rules") or ()):
                yield path + name
        else:
            yield from find_retries(value, f"{path}{name}.")


def take_tasks(env: Any, count: int) -> list[Any]:
    """Return the first tasks."""
    return list(itertools.islice(iter(env.taskset), count))


def describe(task: Any) -> Any:
    """Return what a person reads of a task."""
    prompt = task.data.prompt
    if prompt is None or isinstance(prompt, str):
        return prompt or task.key
    return "\n".join(str(getattr(message, "content", message)) for message in prompt)


async def run_episode(env: Any, task: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Run an episode, and return its score and the parts of it, or the error."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext  # pyright: ignore[reportMissingImports]
    from verifiers.v1.types import SamplingConfig  # pyright: ignore[reportMissingImports]

    variable = f"{KEY}_{next(NUMBERS)}"  # episodes run side by side, and each session has a key of its own
    os.environ[variable] = order["api_key"]
    client = EvalClientConfig(base_url=order["base_url"], api_key_var=variable)
    (slot,) = env.slots(task)
    try:
        episode = await env.run_slot(slot, ModelContext(model=order["model"], client=client, sampling=SamplingConfig()))
    finally:
        del os.environ[variable]
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in getattr(trace, "errors", ()))]
        return {"error": "; ".join(str(getattr(error, "message", error))[:300] for error in errors) or "it is not ok"}
    if strays := [trace.agent.name for trace in episode.traces if not is_trained(trace) and asks_policy(trace, order)]:
        return {
            "error": f"the agent {strays[0]!r} is not to be trained (trainable = False), but the policy answers it: "
            f"give it a model and a client of its own, environment.options.config.{strays[0]}"
        }
    parts: dict[str, float] = {}
    for trace in episode.traces:
        for name, value in [*trace.rewards.items(), *trace.metrics.items()]:
            number = getattr(value, "score", getattr(value, "value", value))
            if isinstance(number, (int, float)):
                parts[name] = float(number)
    rewards = [float(trace.reward) for trace in episode.traces if is_trained(trace)]
    if not rewards:
        return {"error": "no agent of the episode is to be trained"}
    return {"score": sum(rewards) / len(rewards), "parts": parts}


def is_trained(trace: Any) -> bool:
    """Whether what an agent said is to be trained, which an environment denies for judges and simulated users."""
    return trace.agent is None or trace.agent.trainable


def asks_policy(trace: Any, order: dict[str, Any]) -> bool:
    """Whether the policy answered an agent."""
    client = trace.agent.config.client
    return trace.num_turns > 0 and (client is None or client.base_url == order["base_url"])


async def live(settings: dict[str, Any], connection: socket.socket) -> None:
    """Live the episodes that are asked for through the connection, side by side, until it ends."""
    env = load(settings)
    tasks = take_tasks(env, settings["tasks"])
    reader, writer = await asyncio.open_connection(sock=connection)
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(number: int, order: dict[str, Any]) -> None:
        try:
            outcome = await run_episode(env, tasks[order["place"]], order)
        except Exception as error:  # noqa: BLE001  an environment raises what it likes
            outcome = {"error": show(error)}
        writer.write(make_frame(number, outcome))

    async with env.serving():
        with contextlib.suppress(EOFError, ConnectionError):  # the worker has ended
            while True:
                number, length = HEADER.unpack(await reader.readexactly(HEADER.size))
                body = await reader.readexactly(length)
                if body:
                    running[number] = asyncio.create_task(answer(number, json.loads(body)))
                    running[number].add_done_callback(lambda _, number=number: running.pop(number))
                elif number in running:
                    running[number].cancel()
        for task in running.values():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*running.values(), return_exceptions=True)


def show(error: BaseException) -> str:
    """Return the class of an exception and its text, which may raise anything."""
    try:
        return f"{type(error).__name__}: {error}"[:20_000]
    except BaseException:  # noqa: BLE001 - its class may raise anything
        return f"{type(error).__name__}, whose text cannot be read"


def make_frame(number: int, answer: dict[str, Any]) -> bytes:
    """Return an answer as it travels: the number of its request, its length, and JSON."""
    body = json.dumps(answer).encode()
    return HEADER.pack(number, len(body)) + body


def main() -> None:
    mode, settings = sys.argv[1], json.loads(sys.argv[2])
    out = os.dup(1 if mode == "tasks" else 0)
    connection = os.dup(0)
    os.dup2(2, 1)  # what the project prints is no answer
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def reply(answer: Any) -> None:
        with open(out, "wb") as file:
            file.write(json.dumps(answer).encode() if mode == "tasks" else make_frame(0, answer))

    try:
        if mode == "tasks":
            tasks = take_tasks(load(settings), settings["tasks"])
            reply([{"prompt": describe(task)} for task in tasks])
        else:
            asyncio.run(live(settings, socket.socket(fileno=connection)))
    except BaseException as error:
        reply({"error": show(error)})
        raise


if __name__ == "__main__":
    main()
