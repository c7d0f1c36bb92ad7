"""Environments for the tests of sessions, for a model of characters: digits are what is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from podium_agents import Client, Outcome, Step, converse

Task = Mapping[str, Any]


def digits(text: str) -> float:
    """The share of digits in the first three characters."""
    return sum(character.isdigit() for character in text[:3]) / 3


async def twice(task: Task, client: Client) -> dict[str, float]:
    """Two turns, each with its reward."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["prompt"]}]
    total = 0.0
    for _ in range(2):
        reply = await client.chat(messages)
        client.reward(digits(reply.text))
        total += digits(reply.text)
        messages += [reply.message, {"role": "user", "content": "="}]
    return {"score": 0.0, "digits": total}


def agent(task: Task, client: Client, temperature: float = 1.7) -> float:
    """An agent that knows nothing of Podium: it is given an address, a key and a model. It likes to be creative."""
    import openai

    with openai.OpenAI(base_url=client.base_url, api_key=client.api_key) as api:
        said: list[Any] = [{"role": "user", "content": task["prompt"]}]
        first = api.chat.completions.create(model=client.model, messages=said, temperature=temperature)
        said += [first.choices[0].message.to_dict(), {"role": "user", "content": "="}]
        second = api.chat.completions.create(model=client.model, messages=said)
    return digits(second.choices[0].message.content or "")


def alternatives(task: Task, client: Client, count: int = 3) -> float:
    """Asks what else is probable at each place, and ends with an error where that is not told."""
    import openai

    with openai.OpenAI(base_url=client.base_url, api_key=client.api_key) as api:
        asked: Any = {"messages": [{"role": "user", "content": task["prompt"]}], "logprobs": True}
        asked |= {"top_logprobs": count} if count else {}
        choice = api.chat.completions.create(model=client.model, **asked).choices[0]
    for entry in choice.logprobs.content:  # type: ignore[union-attr] - it was asked for
        assert len(entry.top_logprobs) == count
        assert all(other.logprob < 0 for other in entry.top_logprobs)
        assert all(
            abs(other.logprob - entry.logprob) < 1e-4 for other in entry.top_logprobs if other.token == entry.token
        )
    return digits(choice.message.content or "")


async def unlucky(task: Task, client: Client) -> float:
    """Raises, hangs, or is over without a word, as the task says."""
    number = int(task["answer"])
    if number % 8 == 1:
        raise KeyError("no such world")
    if number % 8 == 2:
        await asyncio.sleep(600)
    if number % 8 == 3:
        raise SystemExit(7)
    if number % 8 == 4:
        return float("nan")
    if number % 8 == 5:
        return 0.0
    await client.chat(task["prompt"])
    return 1.0


def unknown_names(row: Task, model: Client) -> float:
    """Has other names than those by which a plain function is known."""
    return float(row is model)


def _counted(marks: str) -> int:
    """How often this was called with the file ``marks``."""
    with open(marks, "a+") as file:
        file.write("x")
        file.seek(0)
        return len(file.read())


async def outage(task: Task, client: Client, after: int, marks: str) -> float:
    """Fails in all sessions but the first ``after`` of the process, as when a simulator is down."""
    if _counted(marks) > after:
        raise ConnectionError("the simulator is down")
    await client.chat(task["prompt"])
    return 1.0


async def patchy(task: Task, client: Client, fails: int, marks: str) -> float:
    """Two conversations a session. The session number ``fails`` of the process raises, and those after it earn 1."""
    number = _counted(marks)
    if number == fails:
        raise ConnectionError("the line is down")
    await client.chat(task["prompt"])
    await client.chat("1+1=")
    return float(number > fails)


async def patient(task: Task, client: Client, pause_s: float = 0.05) -> float:
    """Five turns with pauses, in which generators are lost or get new weights."""
    said: list[dict[str, Any]] = [{"role": "user", "content": task["prompt"]}]
    reply = await client.chat(said)
    for _ in range(4):
        said += [reply.message, {"role": "user", "content": "="}]
        await asyncio.sleep(pause_s)
        reply = await client.chat(said)
    return digits(reply.text)


async def hopeless(task: Task, client: Client) -> float:
    """Always fails."""
    raise RuntimeError("the world is closed")


async def graded_by_reward(task: Task, client: Client) -> Outcome:
    """Leaves the score to ``reward.name``, and shows a part of its own."""
    reply = await client.chat(task["prompt"])
    return Outcome(parts={"digits": digits(reply.text)})


async def endless(task: Task, client: Client, earns: float = 0.0) -> float:
    """Talks until the context is full, and earns something by each turn."""
    said: list[dict[str, Any]] = [{"role": "user", "content": task["prompt"]}]
    while True:
        reply = await client.chat(said)
        client.reward(earns)
        said += [reply.message, {"role": "user", "content": "="}]


class Guess:
    """Three tries; the reward is given by turn."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    @classmethod
    def tasks(cls, split: Literal["train", "test"]) -> Sequence[Task]:
        """Numbers, odd ones for training."""
        return [{"prompt": f"{n:02d}=", "answer": f"{n:02d}"} for n in range(split == "train", 40, 2)]

    def reset(self, task: Task) -> str:
        self.answer, self.left = str(task["answer"]), self.turns
        return str(task["prompt"])

    def step(self, answer: str) -> Step:
        self.left -= 1
        hit = answer[:2] == self.answer
        return Step(say="=", reward=digits(answer), done=hit or not self.left, parts={"hit": float(hit)})


async def debate(task: Task, client: Client) -> Outcome:
    """Two agents with rewards of their own."""
    judge = client.agent("judge")
    first, second = await asyncio.gather(client.chat(task["prompt"]), judge.chat(f"{task['prompt']}="))
    return Outcome(score=digits(first.text), agents={"judge": 1.0 - digits(second.text)})


async def helped(task: Task, client: Client) -> Outcome:
    """Another agent is always right, and the reward scores the client."""
    await client.chat(task["prompt"], max_tokens=2)
    await client.agent("other").chat(task["prompt"], max_tokens=1)
    return Outcome(agents={"other": 1.0})


async def unscored(task: Task, client: Client) -> None:
    """Leaves the second of two answers to the reward."""
    said: list[dict[str, Any]] = [{"role": "user", "content": task["prompt"]}]
    reply = await client.chat(said)
    await client.chat([*said, reply.message, {"role": "user", "content": "="}])


async def aside(task: Task, client: Client) -> float:
    """The last answer, which a text ends, follows the first, and between them is another conversation. Another agent is
    cut off."""
    said: list[dict[str, Any]] = [{"role": "user", "content": task["prompt"]}]
    reply = await client.chat(said, max_tokens=1)
    await client.chat("9=", max_tokens=1)
    last = await client.chat([*said, reply.message, {"role": "user", "content": "="}], stop=[*"0123456789= "])
    await client.agent("other").chat(task["prompt"], max_tokens=1)
    return digits(last.text)


async def interleaved(task: Task, client: Client) -> float:
    """Leaves a conversation for another one, and comes back to it."""
    first: list[dict[str, Any]] = [{"role": "user", "content": task["prompt"]}]
    reply = await client.chat(first)
    await client.chat(f"{task['prompt']}{task['prompt']}")
    first += [reply.message, {"role": "user", "content": "="}]
    return digits((await client.chat(first)).text)


async def tools(task: Task, client: Client) -> float:
    """Has a tool that the model, which knows nothing, does not call."""

    def look(place: int) -> str:
        "Look at a place."
        return str(place)

    reply = await converse(client, [{"role": "user", "content": task["prompt"]}], tools=[look])
    return digits(reply.text)


async def blocking(task: Task, client: Client, until: str) -> float:
    """Holds up all sessions of its process until there is a file ``until``."""
    wait_for_file(until)
    return digits((await client.chat(task["prompt"])).text)


def wait_for_file(path: str) -> None:
    deadline = time.monotonic() + 60
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.05)


def stubborn(task: Task, client: Client) -> float:
    """Computes without an end, ends its process, leaves a process behind, or is fine, as the task says."""
    number = int(task["answer"])
    if number % 5 == 1:
        _ = (number + 8) ** 9**9 % 7  # in C, with the interpreter's lock; of constants, pyright would compute it
    if number % 5 == 2:
        os._exit(3)
    if number % 5 == 3:
        subprocess.Popen(["sleep", "987654"], start_new_session=True)
        raise ValueError("a process is left")
    return asyncio.run(one_turn(task, client))


async def one_turn(task: Task, client: Client) -> float:
    reply = await client.chat(task["prompt"])
    client.reward(random.random() + client.turns)
    return digits(reply.text)


async def pid(task: Task, client: Client) -> float:
    """The number of the process in which the session lives."""
    return float(os.getpid())


async def impatient(task: Task, client: Client) -> float:
    """Does not wait for the first answer."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(client.chat(task["prompt"]), 1e-4)
    return digits((await client.chat(task["prompt"])).text)


def in_a_thread(task: Task, client: Client) -> float:
    """Talks from an event loop of its own."""
    return asyncio.run(one_turn(task, client)) * 0.5


async def leaves_a_call(task: Task, client: Client) -> float:
    """Does not wait for its second call, which is answered when the session is over."""
    await client.chat(task["prompt"])
    late = asyncio.create_task(client.chat(task["prompt"]))
    await asyncio.sleep(0)
    late.add_done_callback(lambda done: done.exception())
    return 1.0


async def misnamed(task: Task, client: Client) -> Outcome:
    """Rewards an agent that is not there."""
    await client.agent("judge").chat(task["prompt"])
    return Outcome(score=1.0, agents={"Judge": 1.0})


async def dotted(task: Task, client: Client) -> float:
    """Would be one conversation with two names."""
    await client.agent("x").agent("y").chat(task["prompt"])
    await client.agent("x.y").chat(task["prompt"])
    return 1.0


async def texts(task: Task, client: Client) -> Any:
    """Returns the score as a text."""
    await client.chat(task["prompt"])
    return "1.0"


async def crowd(task: Task, client: Client) -> float:
    """Has more agents than a session may have."""
    for number in range(1024):
        client.agent(f"a{number}")
    return 1.0


async def forgets(task: Task, client: Client) -> float:
    """Never asks the model."""
    return 1.0


async def varied(task: Task, client: Client) -> float:
    """Fails by one statement, with messages of many kinds and in numbers that differ."""
    await client.chat(task["prompt"])
    if client.seed % 3 == 0:
        raise KeyError(client.session_id)
    return 1.0


async def alone(task: Task) -> float:
    """Has no client."""
    return 1.0


async def fatal(task: Task, client: Client) -> float:
    """End the process of the session where the task begins with 7."""
    if task["prompt"].startswith("7"):
        os.kill(os.getpid(), signal.SIGKILL)
    reply = await client.chat([{"role": "user", "content": task["prompt"]}])
    return digits(reply.text)


def program(task: Task, client: Client, command: Sequence[str], replace: tuple[str, str] = ("", "")) -> float:
    """A program somewhere, which is given an address, a key, a model and a prompt, and prints the last answer."""
    url = client.base_url.replace(replace[0], replace[1]) if replace[0] else client.base_url
    line = [*command, url, client.api_key, client.model, str(task["prompt"])]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr.strip()[-200:]}")
    return digits(done.stdout)
