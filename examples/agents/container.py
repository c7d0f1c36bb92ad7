"""Train a coding agent that runs in a container: any command-line program that takes an address of the OpenAI API.

    podium train grpo --model.path MODEL --data.train tasks.jsonl --environment.name container.py:play \\
        --environment.options '{host: 0.0.0.0, image: my-agent, command: [my-agent, --message], time_limit_s: 1800}'

Each session has a container and an empty directory, which is /work there. The agent is started with the prompt of the
task as its last argument, and with OPENAI_BASE_URL, OPENAI_API_KEY and MODEL in its environment. The key reaches this
session alone, and it is not in the command, which other users of the machine can read. The reward is 1 if the file
answer.txt has the answer of the task in the end. For podman: ``runner: podman``. ``shows: true`` prints each command.
"""

import asyncio
import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podium_agents import Client


@functools.cache
def user_options(runner: str) -> tuple[str, ...]:
    """Return the options of the user who is the owner of /work in a container, which docker and podman without root
    rights number differently. Any other user could write no answer.

    Raises:
        RuntimeError: The runner does not work.
    """
    info = subprocess.run([runner, "info", "--format={{json .}}"], capture_output=True, text=True)
    if info.returncode:
        raise RuntimeError(f"{runner} info ended with status {info.returncode}: {info.stderr[-300:]}")
    facts, user = json.loads(info.stdout), f"--user={os.getuid()}:{os.getgid()}"
    if facts.get("host", {}).get("security", {}).get("rootless"):  # podman's
        return ("--userns=keep-id", user)
    return ("--user=0:0",) if "name=rootless" in (facts.get("SecurityOptions") or ()) else (user,)


def container_command(runner: str, image: str, name: str, folder: str, command: Sequence[str]) -> list[str]:
    """Return the command that starts a container, whose environment has the variables that are named here."""
    variables = [f"--env={variable}" for variable in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "MODEL")]
    limits = ["--memory=4g", "--cpus=2", "--pids-limit=512", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    place = [f"--volume={folder}:/work:Z", "--workdir=/work", *user_options(runner)]  # Z: SELinux lets the agent in
    end = ["--rm", "--stop-timeout=0"]  # podman would wait 10 s for an agent that ignores the end of its session
    return [runner, "run", *end, f"--name={name}", *limits, *place, *variables, image, *command]


async def play(
    task: dict[str, Any],
    client: Client,
    image: str,
    command: Sequence[str],
    runner: str = "docker",
    shows: bool = False,
) -> float:
    """Run the agent in a container, which ends with the session."""
    name = f"podium-{os.getpid()}-{client.session_id}"
    asked = {"OPENAI_BASE_URL": client.base_url, "OPENAI_API_KEY": client.api_key, "MODEL": client.model}
    with tempfile.TemporaryDirectory() as folder:
        words = [*command, str(task["prompt"])]
        line = await asyncio.to_thread(container_command, runner, image, name, folder, words)
        if shows:
            print(*line)
        agent = await asyncio.create_subprocess_exec(
            *line, env={**os.environ, **asked}, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        try:
            _, errors = await agent.communicate()
        finally:
            if agent.returncode is None:  # the time is over, and the container outlives its command
                agent.kill()
                end = await asyncio.create_subprocess_exec(runner, "rm", "--force", name)
                await end.wait()
        if agent.returncode:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]  # a line alone is in the run's metrics
            raise RuntimeError(f"the agent ended with status {agent.returncode}: {last[-300:]}")
        file = Path(folder) / "answer.txt"
        return float(file.is_file() and file.read_text().strip() == str(task["answer"]).strip())
