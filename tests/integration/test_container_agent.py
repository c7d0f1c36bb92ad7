"""The example of an agent in a container. A script stands in for docker: it starts the command with the variables, the
directory and nothing else of what docker would give it. test_real_containers.py starts containers."""

from __future__ import annotations

import asyncio
import os
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from podium.functions import load_function
from podium.rollout.environments import SessionLimits
from podium.rollout.sampling import SamplingParams
from podium_agents.environments.runner import Episode, live
from podium_serve.gateway import Gateway
from tests.unit.rollout.service.scripted import scripted
from tests.waits import LONG_S

pytest.importorskip("uvicorn")

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "container.py"
RUNNER = """#!{python} -IS
import os, sys

if sys.argv[1] == "info":
    print("{info}")
    sys.exit()
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] == "run":
    options = [word for word in sys.argv[2:] if word.startswith("--")]
    command = sys.argv[2 + len(options) + 1 :]
    values = {{}}
    for option in options:
        name, _, value = option.partition("=")
        if name == "--env":
            values[value] = os.environ[value]
        if name == "--volume":
            os.chdir(value.partition(":")[0])
    os.execvpe(command[0], command, values)
"""
AGENT = """
import json, os, sys, time, urllib.request

head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"model": os.environ["MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(address, body, head), timeout=60) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
if said == "wait":
    time.sleep(600)
if said == "fail":
    sys.exit("no such tool")
assert "HOME" not in os.environ
open("answer.txt", "w").write(said)
"""


def test_an_agent_in_a_container_has_its_session_and_ends_with_it(tmp_path: Path) -> None:
    log, runner, agent = tmp_path / "log", tmp_path / "docker", tmp_path / "agent.py"
    runner.write_text(RUNNER.format(python=sys.executable, log=str(log), info="{}"))
    runner.chmod(0o755)
    agent.write_text(AGENT)
    play = load_function(f"{EXAMPLE}:play", key="environment.name")
    service, _, _ = scripted("4<|im_end|>", "5<|im_end|>", "fail<|im_end|>", "wait<|im_end|>")
    service.rules = SamplingParams(max_new_tokens=64)
    names = [f"1-1-{number}" for number in range(4)]
    rows = [{"prompt": "2 + 2?", "answer": "4"}] * 4
    command = [sys.executable, "-I", "-S", str(agent)]

    async def lived(task: Any, client: Any) -> float:
        return await play(task, client, image="my-agent", command=command, runner=str(runner))

    async def run() -> list[Episode]:
        gateway = Gateway()
        async with gateway.open(service, "1-1") as address:
            how: Any = {"address": address, "key_of": gateway.keys.key_of}
            episodes: list[Episode] = []
            for some, time_limit_s in ((slice(3), LONG_S), (slice(3, 4), 2.0)):  # the last one waits for its end
                limits = SessionLimits(time_limit_s=time_limit_s, at_once=1)
                few = rows[some]
                episodes += await live(lived, few, range(len(few)), names[some], service, limits, **how)
        await asyncio.to_thread(gateway.close)
        return episodes

    right, wrong, failed, late = asyncio.run(run())
    assert [one.trajectories[0].score for one in (right, wrong)] == [1.0, 0.0]
    assert "no such tool" in failed.failure and late.failure == "time limit"
    lines = log.read_text().splitlines()
    assert lines[-1] == f"rm --force podium-{os.getpid()}-1-1-3"
    options = shlex.split(lines[0])
    assert {"--env=OPENAI_API_KEY", "--workdir=/work", "--cap-drop=ALL", "my-agent"} <= {*options}
    assert not any(one.startswith("1-1-0.") for one in options), "the key is not in the command"
    assert not any(Path(one.partition("=")[2].partition(":")[0]).exists() for one in options if "--volume" in one)


@pytest.mark.parametrize(
    ("info", "options"),
    [
        ('{"SecurityOptions": ["name=seccomp", "name=rootless"]}', ("--user=0:0",)),  # docker's
        ('{"host": {"security": {"rootless": true}}}', ("--userns=keep-id", f"--user={os.getuid()}:{os.getgid()}")),
        ('{"host": {"security": {"rootless": false}}}', (f"--user={os.getuid()}:{os.getgid()}",)),
        ('{"SecurityOptions": null}', (f"--user={os.getuid()}:{os.getgid()}",)),
    ],
)
def test_the_agent_is_the_owner_of_its_directory(info: str, options: tuple[str, ...], tmp_path: Path) -> None:
    runner = tmp_path / "docker"
    runner.write_text(f"#!/bin/sh\necho '{info}'\n")
    runner.chmod(0o755)
    assert runpy.run_path(str(EXAMPLE))["user_options"](str(runner)) == options
