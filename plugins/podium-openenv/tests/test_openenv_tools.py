"""Environments of OpenEnv in which the model acts by calls of tools: actions of several fields, and MCP tools.

The model's answers are written down here. Some tests start a server, which needs an interpreter with OpenEnv.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError
from podium.rollout.environments import SessionLimits
from podium.rollout.sampling import SamplingParams
from podium_agents import SessionError, Tool, Toolbox
from podium_agents.environments.runner import Episode, live
from tests.unit.rollout.service.scripted import scripted

pytest.importorskip("podium_openenv")

from podium_openenv import environment as module
from podium_openenv.environment import OpenEnv

MOVE = {
    "type": "object",
    "properties": {
        "metadata": {"type": "object"},
        "direction": {"type": "string", "enum": ["up", "down"]},
        "steps": {"type": "integer"},
    },
    "required": ["direction", "steps"],
}
PRICE = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


class Server:
    """What stands in for a server: it answers OpenEnv's messages. The second step, or a call of ``leave``, ends it."""

    def __init__(self) -> None:
        self.actions: list[Mapping[str, Any]] = []
        self.answer: dict[str, Any] = {}

    async def send(self, text: str) -> None:
        message = json.loads(text)
        data = message.get("data", {})
        if message["type"] == "reset":
            self.answer = self.step({"text": "go"})
        elif data.get("type") == "list_tools":
            tools = [{"name": name, "description": f"To {name}.", "input_schema": PRICE} for name in ("price", "leave")]
            self.answer = self.step({"tools": tools})
        elif message["type"] == "step":
            self.actions.append(data)
            if "tool_name" in data:
                self.answer = self.call(data)
            elif not isinstance(data.get("steps"), int):
                self.answer = {"type": "error", "data": {"message": "steps: no integer", "code": "VALIDATION_ERROR"}}
            else:
                count = sum(isinstance(action.get("steps"), int) for action in self.actions)
                self.answer = self.step({"text": f"moved {data['direction']}"}, reward=data["steps"], done=count == 2)

    def call(self, data: Mapping[str, Any]) -> dict[str, Any]:
        name = data["arguments"].get("name")
        if data["tool_name"] == "leave":
            return self.step({"tool_name": "leave", "result": {"data": "bye"}}, reward=1.0, done=True)
        if name != "bolt":
            error = {"error_type": "execution_error", "message": f"no {name} here"}
            return self.step({"tool_name": "price", "result": None, "error": error})
        return self.step({"tool_name": "price", "result": {"content": [{"type": "text", "text": "3"}]}}, reward=0.5)

    def step(self, observation: Any, reward: Any = None, *, done: bool = False) -> dict[str, Any]:
        return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}

    async def recv(self) -> str:
        return json.dumps(self.answer)


def call(name: str, /, **arguments: Any) -> str:
    """What the model says to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


def live_session(environment: OpenEnv, *answers: str) -> tuple[Episode, list[str]]:
    """Live a session in which the model gives these answers. Returns it, and what the model has read at the end."""
    service, source, tokenizer = scripted(*answers)
    service.rules = SamplingParams(max_new_tokens=512)

    async def run() -> list[Episode]:
        return await live(
            environment.play, [{"prompt": "Act."}], [0], ["s"], service, SessionLimits(), address=lambda: ""
        )

    (episode,) = asyncio.run(run())
    return episode, [tokenizer.decode(prompt) for prompt in source.prompts]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server that every environment of a test is connected with, also where websockets is not installed."""
    made = Server()

    @asynccontextmanager
    async def connect(self: OpenEnv) -> AsyncIterator[Server]:
        yield made

    monkeypatch.setattr(OpenEnv, "_connected", connect)
    monkeypatch.setattr(OpenEnv, "_check_installed", lambda self: None)
    monkeypatch.setattr(module, "_fetch", lambda url: {"action": MOVE} if url == "http://x/schema" else None)
    return made


def test_an_action_of_several_fields_is_a_call_whose_form_the_server_says(server: Server) -> None:
    environment = OpenEnv("http://x", acts="fields", observation="text")
    wrong = call("act", direction="up", steps="many")
    answers = [wrong, call("act", direction="up", steps=2), call("act", direction="down", steps=3), "unused"]
    episode, prompts = live_session(environment, *answers)
    assert (episode.failure, dict(episode.parts)) == ("", {"done": 1.0})
    assert [action.get("steps") for action in server.actions] == ["many", 2, 3]
    assert dict(episode.trajectories[0].turn_rewards) == {1: 2.0, 2: 3.0}
    assert '"enum": ["up", "down"]' in prompts[0] and "metadata" not in prompts[0]
    assert "Act.\n\ngo" in prompts[0] and "error: steps: no integer" in prompts[1] and "moved up" in prompts[2]
    assert dict(episode.counts) == {"tool_calls": 3, "tool_errors": 1}


def test_the_tools_of_an_mcp_server_are_the_models(server: Server) -> None:
    environment = OpenEnv("http://x", acts="tools")
    answers = [call("price", name="nut"), call("price", name="bolt"), call("leave"), "unused"]
    episode, prompts = live_session(environment, *answers)
    assert (episode.failure, dict(episode.parts)) == ("", {"done": 1.0})
    assert [(action["tool_name"], action["type"]) for action in server.actions] == [
        ("price", "call_tool"), ("price", "call_tool"), ("leave", "call_tool"),
    ]  # fmt: skip
    assert "To price." in prompts[0] and "error: no nut here" in prompts[1] and prompts[2].count("\n3") == 1
    assert dict(episode.trajectories[0].turn_rewards) == {1: 0.5, 2: 1.0}


def test_nothing_is_done_after_the_end_and_an_answer_without_a_call_ends(server: Server) -> None:
    both = call("leave").replace("<|im_end|>", "\n") + call("price", name="bolt")
    episode, _ = live_session(OpenEnv("http://x", acts="tools"), both)
    assert [action["tool_name"] for action in server.actions] == ["leave"]
    assert dict(episode.counts) == {"tool_calls": 2, "tool_errors": 1}
    episode, _ = live_session(OpenEnv("http://x", acts="tools"), "I do nothing.<|im_end|>")
    assert (episode.failure, dict(episode.parts)) == ("", {"done": 0.0})


def test_a_server_without_tools_or_schema_and_another_way_to_act_are_named(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"environment\.options\.acts = 'speech': expected text, fields, tools"):
        OpenEnv("http://x", acts="speech")
    monkeypatch.setattr(module, "_fetch", lambda url: {})
    episode, _ = live_session(OpenEnv("http://x", acts="fields"), "unused")
    assert "OpenEnv at http://x/schema does not say what its actions are" in episode.failure
    monkeypatch.setattr(server, "step", lambda observation, **_: {"data": {"observation": {"text": "go"}}})
    episode, _ = live_session(OpenEnv("http://x", acts="tools"), "unused")
    assert "has no MCP tools: set environment.options.acts to fields or text" in episode.failure


FIRST = {
    "text": "I act.<|im_end|>",
    "fields": call("act", direction="up", steps=1),
    "tools": call("price", name="bolt"),
}


@pytest.mark.parametrize("acts", FIRST)
@pytest.mark.parametrize("answer", [{"code": "EXECUTION_ERROR"}, {"code": "SESSION_ERROR"}, None, [], ConnectionError])
def test_what_fails_at_the_server_fails_the_session_however_the_model_acts(
    server: Server, monkeypatch: pytest.MonkeyPatch, acts: str, answer: Any
) -> None:
    async def recv() -> str:
        if not server.actions:
            return json.dumps(server.answer)
        if answer is ConnectionError:
            raise ConnectionError("it crashed")
        return json.dumps({"type": "error", "data": {"message": "it crashed", **answer}} if answer else answer)

    monkeypatch.setattr(server, "recv", recv)
    episode, _ = live_session(OpenEnv("http://x", acts=acts), FIRST[acts], "I give up.<|im_end|>")
    assert episode.failure.startswith("SessionError: OpenEnv at ws://x/ws")
    assert ("expected a JSON object" if not answer else "it crashed") in episode.failure


@pytest.mark.parametrize(
    ("acts", "step", "failure"),
    [
        ("fields", {"observation": {"text": "up"}, "reward": "much"}, "ValueError"),
        ("fields", {"observation": {"state": "up"}}, r"environment.options.observation = 'text'"),
        ("tools", {"observation": ["up"]}, "AttributeError"),
        (
            "tools",
            {"observation": {"result": None, "error": {"error_type": "transport_error", "message": "no route"}}},
            "OpenEnv at ws://x/ws did not reach the tool price: no route",
        ),
    ],
)
def test_a_step_that_cannot_be_read_fails_the_session(
    server: Server, monkeypatch: pytest.MonkeyPatch, acts: str, step: Mapping[str, Any], failure: str
) -> None:
    usual = server.recv

    async def recv() -> str:
        return json.dumps({"type": "observation", "data": step}) if server.actions else await usual()

    monkeypatch.setattr(server, "recv", recv)
    environment = OpenEnv("http://x", acts=acts, observation="text" if acts == "fields" else "")
    episode, _ = live_session(environment, FIRST[acts], "I give up.<|im_end|>")
    assert episode.failure.startswith("SessionError: ") and failure in episode.failure


@pytest.mark.parametrize("acts", ["fields", "tools"])
def test_a_step_has_no_limit_but_the_sessions(server: Server, monkeypatch: pytest.MonkeyPatch, acts: str) -> None:
    limits: list[Any] = []

    def make_box(tools: list[Tool]) -> Toolbox:
        limits.extend(entry.time_limit_s for entry in tools)
        return Toolbox(tools)

    monkeypatch.setattr(module, "Toolbox", make_box)
    live_session(OpenEnv("http://x", acts=acts), "I give up.<|im_end|>")
    assert limits and set(limits) == {None}


@pytest.mark.parametrize("ends", ["cancelled", "fails"])
def test_a_late_answer_is_never_taken_for_that_to_another_request(server: Server, ends: str) -> None:
    """As where a program with a limit of its own gives a step up, and goes on."""
    answers: list[Mapping[str, Any]] = [{"data": "late"}, {"data": "second"}]

    async def recv() -> str:
        if ends == "fails" and len(answers) == 2:
            answers.append({})
            raise TimeoutError("no answer in time")
        await asyncio.sleep(0.05)
        return json.dumps(answers.pop(0))

    async def run() -> None:
        line = module._Line(server, "ws://x/ws")
        with contextlib.suppress(TimeoutError, SessionError):
            await asyncio.wait_for(line.ask({"type": "step"}), 0.01)
        with pytest.raises(SessionError, match="an earlier request on this connection has had no answer"):
            await line.ask({"type": "step"})

    server.recv = recv  # type: ignore[method-assign]
    asyncio.run(run())


REAL = """
import sys
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Move(Action):
    direction: str
    steps: int


class Place(Observation):
    text: str


class Field(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.turns = 0
        return Place(text="go", reward=0.0, done=False)

    def step(self, action, timeout_s=None, **kwargs):
        self.turns += 1
        return Place(text=f"moved {action.direction}", reward=float(action.steps), done=self.turns == 2)

    @property
    def state(self):
        return State(episode_id="x", step_count=0)


class Shop(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("shop")

        @mcp.tool
        def price(name: str) -> int:
            "To price."
            return {"bolt": 3}[name]

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(done=False, reward=0.0, metadata={})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(done=True, reward=0.0)

    @property
    def state(self):
        return State(episode_id="x", step_count=0)


if __name__ == "__main__":
    if sys.argv[2] == "fields":
        app = create_app(Field, Move, Place, env_name="field", max_concurrent_envs=8)
    else:
        app = create_app(Shop, CallToolAction, CallToolObservation, env_name="shop", max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def real(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a server of OpenEnv itself."""
    python = os.environ.get("PODIUM_OPENENV_PYTHON")
    if not python:
        pytest.skip("PODIUM_OPENENV_PYTHON does not name the interpreter of an environment with openenv 0.10")
    pytest.importorskip("websockets")
    (tmp_path / "server.py").write_text(REAL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([python, str(tmp_path / "server.py"), str(port), request.param])
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None, "the server ended"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("real", ["fields"], indirect=True)
def test_a_server_of_openenv_says_which_fields_its_actions_have(real: str) -> None:
    answers = [
        call("act", direction="up"),
        call("act", direction="up", steps=2),
        call("act", direction="down", steps=1),
    ]
    episode, prompts = live_session(OpenEnv(real, acts="fields", observation="text"), *answers)
    assert (episode.failure, dict(episode.parts)) == ("", {"done": 1.0})
    assert dict(episode.trajectories[0].turn_rewards) == {1: 2.0, 2: 1.0}
    assert "error: " in prompts[1] and "moved up" in prompts[2]


@pytest.mark.slow
@pytest.mark.parametrize("real", ["tools"], indirect=True)
def test_a_server_of_openenv_lists_its_tools_and_calls_them(real: str) -> None:
    answers = [call("price", name="nut"), call("price", name="bolt"), "3<|im_end|>"]
    episode, prompts = live_session(OpenEnv(real, acts="tools"), *answers)
    assert episode.failure == ""
    assert "To price." in prompts[0] and "error: " in prompts[1] and "\n3<|im_end|>" in prompts[2]
    assert dict(episode.counts) == {"tool_calls": 2, "tool_errors": 1}
