"""Lives episodes of verifiers, in a Python environment of its own. Podium runs this file as a script.

    python -P verifiers_child.py tasks SETTINGS    prints the tasks as one line of JSON
    python -P verifiers_child.py live SETTINGS     a line of JSON for each episode on stdin, and each outcome on stdout

It imports nothing of Podium. ``-P`` keeps this directory, which has a module "verifiers", off the path.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

KEY = "PODIUM_SESSION_KEY"


def load(settings: dict[str, Any]) -> Any:
    """The environment that the settings name."""
    from verifiers.v1 import Env, EnvConfig  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.generic import concrete_type  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.loaders import environment_class, load_environment  # pyright: ignore[reportMissingImports]

    given = {"taskset": {"id": settings["taskset"], **settings["taskset_config"]}, **settings["config"]}
    found = environment_class(settings["taskset"], given.get("id", ""))
    env = load_environment((concrete_type(found, EnvConfig, origin=Env) or EnvConfig).model_validate(given))
    if where := next(retries(env.config.model_dump()), None):
        raise ValueError(
            f"environment.options.config.{where} begins failed episodes again, and what was said in the abandoned ones "
            "would be trained with the reward of the last: leave it at 0, for Podium counts sessions that fail"
        )
    return env


def retries(config: dict[str, Any], path: str = "") -> Iterator[str]:
    """Where a configuration asks for whole episodes to be begun again."""
    for name, value in config.items():
        if not isinstance(value, dict):
            continue
        if name == "retries":
            if value.get("max_retries") or any(rule.get("max_retries") for rule in value.get("rules") or ()):
                yield path + name
        else:
            yield from retries(value, f"{path}{name}.")


def tasks_of(env: Any, count: int) -> list[Any]:
    """The first tasks."""
    return list(itertools.islice(iter(env.taskset), count))


def shown(task: Any) -> Any:
    """What a person reads of a task."""
    prompt = task.data.prompt
    if prompt is None or isinstance(prompt, str):
        return prompt or task.key
    return "\n".join(str(getattr(message, "content", message)) for message in prompt)


async def lived(env: Any, task: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """One episode, and what it earned."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext  # pyright: ignore[reportMissingImports]
    from verifiers.v1.types import SamplingConfig  # pyright: ignore[reportMissingImports]

    os.environ[KEY] = asked["api_key"]
    client = EvalClientConfig(base_url=asked["base_url"], api_key_var=KEY)
    (slot,) = env.slots(task)
    episode = await env.run_slot(slot, ModelContext(model=asked["model"], client=client, sampling=SamplingConfig()))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in getattr(trace, "errors", ()))]
        return {"error": "; ".join(str(getattr(error, "message", error))[:300] for error in errors) or "it is not ok"}
    if strays := [trace.agent.name for trace in episode.traces if not trained(trace) and asks(trace, asked)]:
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
    rewards = [float(trace.reward) for trace in episode.traces if trained(trace)]
    if not rewards:
        return {"error": "no agent of the episode is to be trained"}
    return {"score": sum(rewards) / len(rewards), "parts": parts}


def trained(trace: Any) -> bool:
    """Whether what an agent said is to be trained, which an environment denies for judges and simulated users."""
    return trace.agent is None or trace.agent.trainable


def asks(trace: Any, asked: dict[str, Any]) -> bool:
    """Whether the policy answered an agent."""
    client = trace.agent.config.client
    return trace.num_turns > 0 and (client is None or client.base_url == asked["base_url"])


async def live(settings: dict[str, Any], out: Any) -> None:
    """Live the episodes that are asked for on stdin, side by side, until it ends."""
    env = load(settings)
    tasks = tasks_of(env, settings["tasks"])
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running: set[asyncio.Task[None]] = set()

    async def one(asked: dict[str, Any]) -> None:
        try:
            outcome = await lived(env, tasks[asked["place"]], asked)
        except Exception as error:  # noqa: BLE001  an environment raises what it likes
            outcome = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps({"id": asked["id"], **outcome}) + "\n")
        out.flush()

    async with env.serving():
        while line := await reader.readline():
            asked = json.loads(line)
            if "cancel" in asked:
                for task in running:
                    if task.get_name() == asked["cancel"]:
                        task.cancel()
                continue
            task = asyncio.create_task(one(asked), name=asked["id"])
            running.add(task)
            task.add_done_callback(running.discard)
        for task in running:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*running, return_exceptions=True)


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the project prints is no answer
    how, settings = sys.argv[1], json.loads(sys.argv[2])
    try:
        if how == "tasks":
            found = tasks_of(load(settings), settings["tasks"])
            out.write(json.dumps([{"prompt": shown(task)} for task in found]) + "\n")
            out.flush()
        else:
            asyncio.run(live(settings, out))
    except BaseException as error:
        out.write(json.dumps({"id": "", "error": f"{type(error).__name__}: {error}"}) + "\n")
        out.flush()
        raise


if __name__ == "__main__":
    main()
