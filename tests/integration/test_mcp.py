"""Tools of an MCP server, which is a real one in a process of its own."""

from __future__ import annotations

import asyncio
import doctest
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podium.errors import ConfigError
from podium_agents import SessionError, Toolbox, converse, mcp_tools
from tests.lazy_module import import_when_used
from tests.unit.rollout.test_runner import lived
from tests.waits import LONG_S

import_when_used("mcp")
SERVER = str(Path(__file__).with_name("mcp_server.py"))


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "1", "function": {"name": name, "arguments": arguments}}


def test_tools_of_a_server_are_called_and_its_errors_are_told_but_not_its_end() -> None:
    async def play() -> list[str]:
        async with mcp_tools(sys.executable, SERVER, time_limit_s=LONG_S) as tools:
            box = Toolbox(tools)
            assert box.schemas[0]["function"]["description"] == "Look a price up."
            assert box.schemas[0]["function"]["parameters"]["required"] == ["name"]
            said = [call("price", '{"name": "bolt"}'), call("price", '{"name": "nut"}'), call("price", "{}")]
            said += [call("read", "{}"), call("measure", "{}")]
            contents = [message["content"] for each in said for message in await box.answer([each])]
            for last in (call("die", "{}"), call("price", '{"name": "bolt"}')):
                with pytest.raises(SessionError, match=r"the MCP server '.*' gave no answer to a call of"):
                    await box.answer([last])
            return contents

    right, wrong, missing, files, structured = asyncio.run(play())
    assert right == "3"
    assert wrong.startswith("error: ")
    assert "name" in missing
    assert files == "M8 x 20\nfile:///nut.txt\n[image]"
    assert structured == '{"thread": "M8", "length": 20}'


@pytest.mark.parametrize(
    ("code", "message", "is_told"),
    [
        (-32602, "Unknown tool", True),
        (-32603, "the database is locked", True),
        (-32603, "Server returned an error response", False),  # a status of HTTP
        (-32600, "Session terminated", False),
        (-32000, "Connection closed", False),
        (None, "All connection attempts failed", False),
    ],
)
def test_what_a_server_answers_is_told_and_a_lost_connection_is_not(
    code: int | None, message: str, is_told: bool
) -> None:
    from mcp import MCPError

    from podium_agents.environments.mcp import _tool

    class Client:
        async def call_tool(self, *_: Any) -> Any:
            raise ConnectionError(message) if code is None else MCPError(code, message)

    described = SimpleNamespace(name="price", description="", input_schema={})
    box = Toolbox([_tool(Client(), described, "x", LONG_S)])
    if is_told:
        (answer,) = asyncio.run(box.answer([call("price", "{}")]))
        assert answer["content"] == f"error: the MCP server 'x': {message}"
    else:
        with pytest.raises(SessionError, match=f"the MCP server 'x' gave no answer to a call of price: {message}"):
            asyncio.run(box.answer([call("price", "{}")]))


def test_sessions_that_end_leave_no_server(tmp_path: Path) -> None:
    """Not when the environment raises, and not when its time is over."""

    async def play(how: str) -> None:
        async with mcp_tools(sys.executable, SERVER):
            (tmp_path / how).write_text(" ".join(_children()))
            if how == "raises":
                raise KeyError("a world")
            await asyncio.sleep(600)

    async def play_until_the_server_runs() -> None:
        async with asyncio.timeout(None) as limit:

            async def pass_limit() -> None:
                while not (tmp_path / "hangs").exists():  # noqa: ASYNC110 - a file has no event
                    await asyncio.sleep(0.01)
                limit.reschedule(asyncio.get_running_loop().time())

            passing = asyncio.create_task(pass_limit())
            await play("hangs")
            await passing

    with pytest.raises(KeyError):
        asyncio.run(play("raises"))
    with pytest.raises(TimeoutError):
        asyncio.run(play_until_the_server_runs())
    pids = (tmp_path / "raises").read_text().split() + (tmp_path / "hangs").read_text().split()
    assert len(pids) >= 2
    assert not [pid for pid in pids if SERVER in _command(pid)]


def _children() -> list[str]:
    return [path.name for path in Path("/proc").iterdir() if path.name.isdigit() and SERVER in _command(path.name)]


def _command(pid: str) -> str:
    if int(pid) == os.getpid():
        return ""
    try:
        return (Path("/proc") / pid / "cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize("server", ["no-such-command-anywhere", "http://127.0.0.1:9/mcp"])
def test_a_server_that_is_not_there_is_named(server: str) -> None:
    async def play() -> None:
        async with mcp_tools(server):
            pass

    with pytest.raises(ConfigError, match=f"the MCP server '{server}' does not answer"):
        asyncio.run(play())


def test_the_example_of_mcp_tools_is_lived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = doctest.DocTestParser().get_examples(mcp_tools.__doc__ or "")
    given: dict[str, Any] = {"mcp_tools": mcp_tools, "converse": converse}
    exec(example.source, given)
    (tmp_path / "server.py").write_text(Path(SERVER).read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # of the example's "python"
    (episode,) = lived(given["play"], [{"prompt": "Which number?", "answer": "999"}])
    assert (episode.failure, episode.trajectories[0].score) == ("", 1.0)
