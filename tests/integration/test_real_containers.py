"""The example of an agent in a container, with docker and podman themselves: a program that lets a model write code,
runs the code and shows the model what it prints. It has no network but the container's."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podium.functions import load_function
from podium.rollout.environments import SessionLimits
from podium.rollout.sampling import SamplingParams
from podium.telemetry import metrics
from podium.trainer import GRPOConfig
from podium_agents.environments.runner import Episode, live
from podium_serve.gateway import Gateway
from tests.integration.containers import PYTHON, use_image
from tests.integration.test_environments import TEMPLATE
from tests.integration.training import metrics_rows, tiny, train
from tests.unit.rollout.service.scripted import scripted

pytest.importorskip("uvicorn")

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "container.py"
AGENT = """
import json, os, subprocess, sys, urllib.request

if os.listdir("."):
    sys.exit("the directory is not empty")
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
messages = [{"role": "user", "content": sys.argv[1]}]
for turn in range(2):
    body = json.dumps({"model": os.environ["MODEL"], "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
    with urllib.request.urlopen(request, timeout=60) as answer:
        messages.append(json.load(answer)["choices"][0]["message"])
    code = messages[-1].get("content") or ""
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    if "no such tool" in ran.stderr:
        sys.exit("no such tool")
    messages.append({"role": "user", "content": ran.stdout[-20:] or "="})
"""


@pytest.fixture(params=["docker", "podman"])
def runner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def image(runner: str) -> Iterator[str]:
    with use_image(runner, AGENT) as name:
        yield name


def list_containers(runner: str) -> list[str]:
    """The containers of this process that are there, running or not."""
    listed = subprocess.run([runner, "ps", "--all", "--format={{.Names}}"], capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split() if name.startswith(f"podium-{os.getpid()}-")]


def test_an_agent_in_a_real_container_has_its_session_and_ends_with_it(runner: str, image: str) -> None:
    play = load_function(f"{EXAMPLE}:play", key="environment.name")
    replies = ["print(2 + 2)", "open('answer.txt', 'w').write('4')", "raise SystemExit('no such tool')"]
    service, source, _ = scripted(*(f"{reply}<|im_end|>" for reply in replies), None)
    service.rules = SamplingParams(max_new_tokens=64)
    names = [f"1-1-{number}" for number in range(3)]
    rows = [{"prompt": "2 + 2?", "answer": answer} for answer in ("4", "4", "never")]
    command = [PYTHON, "-I", "-S", "/agent.py"]
    containers: list[str] = []

    async def lived(task: Any, client: Any) -> float:
        playing = asyncio.create_task(play(task, client, image=image, command=command, runner=runner))
        while task["answer"] == "never" and not playing.done() and len(source.prompts) < 4:
            await asyncio.wait([playing], timeout=0.05)
        if task["answer"] == "never":  # and the agent waits for an answer
            containers.extend(list_containers(runner))
            playing.cancel()
        return await playing

    async def run() -> list[Episode]:
        gateway = Gateway("0.0.0.0")
        async with gateway.open(service, "1-1") as address:
            how: Any = {"address": address, "key_of": gateway.keys.key_of}
            episodes = await live(lived, rows, range(3), names, service, SessionLimits(at_once=1), **how)
        await asyncio.to_thread(gateway.close)
        return episodes

    right, failed, ended = asyncio.run(run())
    assert right.failure == ""
    assert right.trajectories[0].score == 1.0
    assert failed.failure == "RuntimeError: the agent ended with status 1: no such tool"
    assert ended.failure
    assert len(containers) == 1
    assert list_containers(runner) == []


@pytest.mark.exhaustive
@pytest.mark.slow
def test_agents_in_real_containers_are_trained(runner: str, image: str, tmp_path: Path) -> None:
    options = {"host": "0.0.0.0", "image": image, "runner": runner, "command": [PYTHON, "-I", "-S", "/agent.py"]}
    environment = {"name": f"{EXAMPLE}:play", "options": {**options, "at_once": 4}}
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    data = {"chat_template": str(tmp_path / "chat.jinja")}
    run = train(tiny(GRPOConfig, tmp_path, environment=environment, data=data, run={"steps": 1}, eval={"items": 0}))
    (row,) = metrics_rows(run)
    assert (row[metrics.SESSIONS_FAILED], row[metrics.SESSIONS_TURNS], row[metrics.SESSIONS_ROWS]) == (0, 2, 16)
    assert row[metrics.MISMATCH_MAX] < 1e-5
    assert list_containers(runner) == []
