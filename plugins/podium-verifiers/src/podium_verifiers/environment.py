"""Environments of verifiers 0.4, unchanged, in a process of their own, which may have another Python environment.

    podium train grpo --environment.name verifiers --environment.options '{taskset: my_taskset}' ...

An episode's program asks for completions at the session's address, as it would ask any model. Its rewards are the
session's. The process is started once in each rollout worker, and lives all its episodes side by side.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from podium.errors import ConfigError, PodiumError
from podium.processes import Launched, Requests, describe_exit
from podium_agents import Outcome

if TYPE_CHECKING:
    from podium_agents import Client, Task

__all__ = ["Verifiers"]

_CHILD = Path(__file__).with_name("child.py")


class Verifiers:
    """The tasks of a taskset, lived by its environment.

    Args:
        taskset: The name of the taskset, which is a module or one of verifiers' own.
        taskset_config: Its settings.
        config: The settings of the environment beside its taskset, as verifiers has them: ``agent``, ``timeout`` …
            By default the agent is verifiers' chat program, without a shell, in a subprocess.
        tasks: At most this many tasks are taken.
        held_out: This share of them, the last ones, is for evaluation.
        python: The interpreter of the environment in which verifiers is installed; by default the run's own.

    Raises:
        ConfigError: There is no such interpreter.
    """

    def __init__(
        self,
        taskset: str,
        taskset_config: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        tasks: int = 1000,
        held_out: float = 0.1,
        python: str = "",
    ) -> None:
        self._python = str(Path(python or sys.executable).absolute())  # verifiers changes the working directory
        if not Path(self._python).exists():
            raise ConfigError(f"environment.options.python = {python!r}: there is no such interpreter")
        usual = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
        self._settings = json.dumps(
            {
                "taskset": taskset,
                "taskset_config": dict(taskset_config or {}),
                "config": dict(config) if config is not None else usual,
                "tasks": tasks,
            }
        )
        self._label, self._held_out = taskset, held_out
        self._process: _Process | None = None

    def tasks(self, split: Literal["train", "test"]) -> Sequence[Task]:
        """Return the tasks of a split."""
        command = [self._python, "-P", str(_CHILD), "tasks", self._settings]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(self._python), check=False)
        if done.returncode:
            raise ConfigError(f"environment.options.taskset = {self._label!r}: {_explain_end(done)}")
        rows: list[dict[str, Any]] = json.loads(done.stdout)
        first = len(rows) - max(1, round(self._held_out * len(rows)))
        places = range(first) if split == "train" else range(first, len(rows))
        return [{**rows[place], "answer": None, "place": place} for place in places]

    async def play(self, task: Task, client: Client) -> Outcome:
        """Live the episode of a task."""
        if self._process is None or self._process.over:
            self._process = _Process([self._python, "-P", str(_CHILD), "live", self._settings])
        answer = await self._process.ask(
            {
                "place": int(task["place"]),
                "base_url": client.base_url,
                "api_key": client.api_key,
                "model": client.model,
            }
        )
        if "error" in answer:
            raise PodiumError(f"verifiers: {answer['error']}")
        return Outcome(score=float(answer["score"]), parts=answer["parts"])


class _Process:
    """The process, which lives episodes.

    Attributes:
        over: Whether it has ended.
    """

    def __init__(self, line: Sequence[str]) -> None:
        self._launched = Launched(line, env=_environment(line[0]))
        self._requests = Requests(self._launched.channel, _settle)
        self._failure = self._requests.expect(0)  # in words of its own
        self.over = False
        threading.Thread(target=self._read, name="podium-verifiers", daemon=True).start()

    async def ask(self, episode: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outcome of an episode. Raises PodiumError where the process ended."""
        try:
            outcome = self._requests.send(episode)
        except OSError as error:
            raise PodiumError(f"the process of verifiers has ended: {error}") from error
        try:
            return await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            self._requests.cancel(outcome)
            raise

    def _read(self) -> None:
        self._requests.settle_until_end()
        self.over = True
        self._launched.reap()
        self._launched.channel.close()
        end = describe_exit(self._launched.process.returncode)
        reason = f": {self._failure.result()['error']}" if self._failure.done() else ""
        self._requests.fail(PodiumError(f"the process of verifiers ended with {end}{reason}"))


def _settle(answer: Future[Any], body: bytes) -> None:
    answer.set_result(json.loads(body))


def _explain_end(done: subprocess.CompletedProcess[str]) -> str:
    """Say why the process ended with an error: what it answered or, where Python did not start, its last line."""
    if done.stdout:
        error = str(json.loads(done.stdout)["error"])
    else:
        error = ([f"exit status {done.returncode}", *done.stderr.strip().splitlines()])[-1]
    if error.startswith(("ModuleNotFoundError", "ImportError")):
        error += "; verifiers is to be installed for environment.options.python, and the taskset to be importable there"
    return error


def _environment(python: str) -> dict[str, str]:
    """Return the environment of the process, in which the commands beside ``python`` are found."""
    path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")])
    modules = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PATH": path, "PYTHONPATH": modules}
