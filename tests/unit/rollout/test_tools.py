"""Functions as tools: their schemas, and what the model hears when a call goes wrong."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import json
import os
import threading
import time
from collections import Counter
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from podium.errors import ConfigError
from podium_agents import SessionError, Toolbox, ToolError, in_thread, tool
from podium_agents.environments.calls import session_counts
from tests.waits import LONG_S, all_end


@dataclass
class Part:
    """A part, as a tool takes and returns it."""

    name: str
    made: datetime.date | None = None


def add(a: int, b: int = 1, how: Literal["x", "y"] = "x") -> int:
    """Add two numbers.

    They may be negative.

    Args:
        a: The first
            number.
        b (int): The second.

    Returns:
        The sum.
    """
    return a + b


async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


def spin(pid_file: str) -> None:
    """Never end."""
    with open(pid_file, "w") as file:
        file.write(str(os.getpid()))
    while True:
        time.sleep(0.01)


def leave() -> str:
    """End the process."""
    os._exit(7)


def refuse() -> str:
    """Refuse."""
    raise ToolError("not today")


def run_code(code: str) -> str:
    """Run code that a model has written."""
    exec(code)
    return "done"


def quit_all() -> str:
    """Raise what ends programs."""
    raise SystemExit(3)


def place(state: list[int], x: int) -> dict[str, Any]:
    """Change the state of the session."""
    state.append(x)
    return {"state": state}


def answer(box: Toolbox, name: str, arguments: object = "{}", counts: Counter[str] | None = None) -> str:
    given = arguments if isinstance(arguments, str) or arguments is None else json.dumps(arguments)
    context = copy_context()
    context.run(session_counts.set, counts)
    answering = box.answer([{"id": "c7", "function": {"name": name, "arguments": given}}])
    (message,) = context.run(asyncio.run, answering)
    assert (message["role"], message["tool_call_id"]) == ("tool", "c7")
    return str(message["content"])


def test_annotations_and_docstring_make_the_schema() -> None:
    (schema,) = Toolbox([add]).schemas
    assert schema["function"]["name"] == "add"
    assert schema["function"]["description"] == "Add two numbers.\n\nThey may be negative."
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"description": "The first number.", "type": "integer"},
            "b": {"default": 1, "description": "The second.", "type": "integer"},
            "how": {"default": "x", "enum": ["x", "y"], "type": "string"},
        },
        "required": ["a"],
    }


Short = Annotated[str, Field(max_length=3)]


def describe(
    field: Annotated[int, Field(description="By a field.", gt=0)],
    both: Annotated[int, Field(description="By a field.")],
    later: Annotated[Short, Field(description="By a later field.")],
    constrained: Short,
    empty: Annotated[int, Field(description="")],
    part: Annotated[Part, Field(description="By a field.")],
    nothing: Annotated[int, "a note"],
    kept: Annotated[int, Field(description="By a field.")] = 4,
    default: int = Field(3, description="By a default.", le=9),
    made: list[int] = Field(default_factory=list),  # noqa: B008 - as models have it
) -> list[int]:
    """Describe.

    Args:
        both: By the docstring.
        constrained: By the docstring.
        empty: By the docstring.
        made: By the docstring.
    """
    return [field, kept, default, *made]


def test_a_description_in_a_field_is_read_and_comes_before_the_docstring() -> None:
    parameters = tool(describe).schema["function"]["parameters"]
    assert {name: entry.get("description") for name, entry in parameters["properties"].items()} == {
        "field": "By a field.",
        "both": "By a field.",
        "later": "By a later field.",
        "constrained": "By the docstring.",
        "empty": "By the docstring.",
        "part": "By a field.",
        "nothing": None,
        "kept": "By a field.",
        "default": "By a default.",
        "made": "By the docstring.",
    }
    assert parameters["properties"]["field"]["exclusiveMinimum"] == 0
    assert parameters["properties"]["constrained"]["maxLength"] == 3
    assert parameters["properties"]["default"]["default"] == 3
    assert parameters["required"] == ["field", "both", "later", "constrained", "empty", "part", "nothing"]
    arguments = dict.fromkeys(("field", "both", "empty", "nothing"), 1)
    arguments |= {"later": "abc", "constrained": "abc", "part": {"name": "bolt"}}
    box = Toolbox([describe])
    assert json.loads(answer(box, "describe", arguments)) == [1, 4, 3]
    assert "default: Input should be less than or equal to 9" in answer(box, "describe", {**arguments, "default": 10})


def test_a_call_is_answered_and_what_goes_wrong_is_said() -> None:
    box, counts = Toolbox([add, refuse, quit_all]), Counter[str]()
    assert answer(box, "add", {"a": 2}, counts) == "3"
    assert answer(box, "add", '{"a": "2"}') == "3"
    wrong = [
        ("add", {"a": "two"}, "error: add cannot be called so: a: Input should be a valid integer"),
        ("add", {"a": 1, "c": 2}, "error: add cannot be called so: c: Extra inputs are not permitted"),
        ("add", None, "error: add cannot be called so: a: Field required"),
        ("add", "{", "error: the arguments are no valid JSON"),
        ("add", "[1]", "error: the arguments are list; expected a JSON object"),
        ("ad", {"a": 1}, "error: there is no tool 'ad'; there are add, refuse, quit_all"),
        ("refuse", {}, "error: not today"),
        ("quit_all", {}, "error: SystemExit: 3"),
    ]
    for name, arguments, said in wrong:
        assert answer(box, name, arguments, counts).startswith(said)
    assert counts == {"tool_calls": 9, "tool_errors": 8}


def test_a_call_that_takes_too_long_is_answered_with_an_error() -> None:
    box = Toolbox([tool(wait, time_limit_s=0.1), tool(wait, name="patient", time_limit_s=LONG_S)])
    assert answer(box, "wait", {"seconds": 600}) == "error: wait took longer than 0.1 s"
    assert answer(box, "patient", {"seconds": 0}) == "done"


def test_a_process_of_its_own_is_killed_with_its_call(tmp_path: Any) -> None:
    box = Toolbox([tool(spin, process=True, time_limit_s=LONG_S), tool(leave, process=True), tool(add, process=True)])
    pid_file = tmp_path / "pid"

    async def cancelled() -> None:
        call = {"id": "1", "function": {"name": "spin", "arguments": json.dumps({"pid_file": str(pid_file)})}}
        running = asyncio.create_task(box.answer([call]))
        while not pid_file.exists() or not pid_file.read_text():  # noqa: ASYNC110  another process writes it
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert all_end([int(pid_file.read_text())])
    assert answer(box, "leave") == "error: its process ended (exit code 7)"
    assert answer(box, "add", {"a": 5}) == "6"


def test_code_that_a_tool_runs_in_a_process_cannot_run_in_the_worker(tmp_path: Path) -> None:
    """Exploit: the code answers in place of its tool, with a pickle that makes a file where it is read."""
    box, caught = Toolbox([tool(run_code, process=True)]), tmp_path / "caught"
    code = f"""
import os, pickle
class Exploit:
    def __reduce__(self):
        return os.mkdir, ({str(caught)!r},)
for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
    try:
        os.write(fd, pickle.dumps((True, Exploit())))
    except OSError:
        pass
os._exit(0)
"""
    assert answer(box, "run_code", {"code": code}) == "error: its process sent something other than a result"
    assert not caught.exists()
    assert answer(box, "run_code", {"code": "import os; print(1); os.system('echo 2')"}) == "done"
    assert answer(box, "run_code", {"code": "x"}) == "error: NameError: name 'x' is not defined"


LEFT = ("subprocess.Popen(sleep)", "subprocess.Popen(sleep, start_new_session=True)", "daemon()")
ENDS = ("pass", "os._exit(3)", "time.sleep(600)")


@pytest.mark.everyday(
    "subprocess.Popen(sleep)-pass",
    "subprocess.Popen(sleep, start_new_session=True)-os._exit(3)",
    "daemon()-time.sleep(600)",
)
@pytest.mark.parametrize(("left", "ends"), list(itertools.product(LEFT, ENDS)))
def test_whatever_a_process_has_started_ends_with_its_call(left: str, ends: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
import os, subprocess, sys, time
note = "import os, time; open({str(pids)!r}, 'a').write(str(os.getpid()) + ' '); time.sleep(600)"
sleep = [sys.executable, "-c", note]
def daemon():
    if not os.fork():
        os.setsid()
        if not os.fork():
            open({str(pids)!r}, "a").write(str(os.getpid()) + " ")
            time.sleep(600)
        os._exit(0)
{left}
while not (os.path.exists({str(pids)!r}) and open({str(pids)!r}).read()):
    time.sleep(0.01)
{ends}
"""
    for limit_s in (2, 8, 32, 128) if ends == "time.sleep(600)" else (128,):
        said = answer(Toolbox([tool(run_code, process=True, time_limit_s=limit_s)]), "run_code", {"code": code})
        expected = {"pass": "done", "os._exit(3)": "error: its process ended (exit code 3)"}
        assert said == expected.get(ends, f"error: run_code took longer than {limit_s} s")
        if pids.exists():  # otherwise the limit had passed before the process started anything
            break
    assert all_end(map(int, pids.read_text().split()))


def variables() -> list[str]:
    """List what looks like a secret here, and at the processes above."""
    found = [name for name in os.environ if name.startswith("TEST_")]
    pid = os.getppid()
    while pid > 1:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found += [f"{entry.decode()} above" for entry in entries if entry.startswith(b"TEST_HF_TOKEN=of")]
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def want() -> str:
    """Read a variable."""
    return os.environ["TEST_HF_TOKEN"]


def lose() -> str:
    """Lose the server behind the tool."""
    raise SessionError("the server is gone")


async def lose_in_group() -> str:
    """Lose the server in a group of tasks."""
    raise ExceptionGroup("tasks", [ValueError("x"), SessionError("the server is gone")])


def recover() -> str:
    """Tell the model nevertheless."""
    try:
        return lose()
    except SessionError as error:
        raise ToolError("try again") from error


def test_a_tool_can_fail_the_session() -> None:
    with pytest.raises(SessionError, match="the server is gone"):
        answer(Toolbox([lose]), "lose")
    with pytest.raises(SessionError, match="the server is gone"):
        answer(Toolbox([tool(lose, process=True)]), "lose")
    with pytest.raises(ExceptionGroup):
        answer(Toolbox([lose_in_group]), "lose_in_group")
    assert answer(Toolbox([recover]), "recover") == "error: try again"


def test_a_tool_may_have_no_limit_of_its_own() -> None:
    box = Toolbox([tool(wait, time_limit_s=None), tool(wait, name="apart", time_limit_s=None, process=True)])
    assert answer(box, "wait", {"seconds": 0.01}) == answer(box, "apart", {"seconds": 0.01}) == "done"


def test_a_process_of_a_tool_has_no_secret_that_it_does_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("TEST_HF_TOKEN", "TEST_WANDB_API_KEY", "TEST_PODIUM_TOKEN", "TEST_PAT", "TEST_NETRC")
    for name in secrets:
        monkeypatch.setenv(name, f"of {name}")
    monkeypatch.setenv("TEST_DATABASE_URL", "postgres://u:hunter2@db/x")
    monkeypatch.setenv("TEST_PLAIN", "1")
    box = Toolbox([tool(variables, process=True), tool(want, process=True)])
    assert json.loads(answer(box, "variables")) == ["TEST_PLAIN"]
    assert "TEST_HF_TOKEN does not reach the tool unless tool(env=...) names it" in answer(box, "want")
    named = Toolbox([tool(variables, process=True, env=["TEST_HF_TOKEN"])])
    assert sorted(json.loads(answer(named, "variables"))) == ["TEST_HF_TOKEN", "TEST_PLAIN"]


def test_a_coroutine_function_runs_in_a_process_too() -> None:
    assert answer(Toolbox([tool(wait, process=True)]), "wait", {"seconds": 0}) == "done"


def test_what_is_no_unicode_is_told_as_far_as_it_can_be() -> None:
    def listing() -> str:
        """List names of files."""
        return os.fsdecode(b"caf\xe9") + "\ud83d\ude00"

    for process in (True, False):
        assert answer(Toolbox([tool(listing, process=process)]), "listing") == "caf\ufffd\U0001f600"


def test_a_process_writes_results_as_a_thread_does() -> None:
    for function, arguments in ((place, {"state": [], "x": 1}), (refuse, {}), (add, {"a": 1})):
        said = {answer(Toolbox([tool(function, process=on)]), function.__name__, arguments) for on in (True, False)}
        assert len(said) == 1, said


def test_what_is_no_json_is_told_as_arguments_are_written() -> None:
    def made(part: Part) -> list[Any]:
        """Say when a part was made."""
        part.made = datetime.date(2026, 1, 2)
        return [part, {3}, b"\xff"]

    for process in (True, False):
        told = json.loads(answer(Toolbox([tool(made, process=process)]), "made", {"part": {"name": "bolt"}}))
        assert told == [{"name": "bolt", "made": "2026-01-02"}, [3], "b'\\xff'"]


def test_given_arguments_are_neither_shown_nor_taken_from_the_model() -> None:
    state: list[int] = []
    box = Toolbox([tool(place, given={"state": state})])
    assert list(box.schemas[0]["function"]["parameters"]["properties"]) == ["x"]
    assert json.loads(answer(box, "place", {"x": 4})) == {"state": [4]}
    assert answer(box, "place", {"x": 4, "state": []}).startswith("error: place cannot be called so: state")
    assert state == [4]


def test_functions_that_block_run_in_threads() -> None:
    def where() -> bool:
        """Where."""
        return threading.current_thread() is threading.main_thread()

    assert answer(Toolbox([where]), "where") == "false"


def no_annotation(x) -> int:  # type: ignore[no-untyped-def]  # noqa: ANN001
    return int(x)


def many(*values: int) -> int:
    return sum(values)


def no_schema(x: threading.Lock) -> int:
    return 0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_annotation, "the parameter 'x' without an annotation"),
        (many, r"the parameter \*values"),
        (no_schema, "without a JSON schema"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_by_name(function: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"the tool '{function.__name__}' has .*{words}"):
        Toolbox([function])


def test_two_tools_have_two_names() -> None:
    with pytest.raises(ConfigError, match="two tools are named 'add'"):
        Toolbox([add, add])
    with pytest.raises(ConfigError, match="has no parameter 'z'"):
        tool(add, given={"z": 1})


async def give_up() -> str:
    """Await what is cancelled."""
    inner = asyncio.create_task(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(inner.cancel)
    await inner
    return "done"


def test_a_cancellation_within_a_tool_is_an_error_of_the_tool() -> None:
    counts: Counter[str] = Counter()
    assert answer(Toolbox([give_up]), "give_up", counts=counts).startswith("error: CancelledError")
    assert counts == {"tool_calls": 1, "tool_errors": 1}


@pytest.mark.parametrize("kind", [TimeoutError, ValueError])
def test_an_error_in_a_thread_is_raised_as_it_is(kind: type[Exception]) -> None:
    """Asyncio put another TimeoutError in its place, without what was known of it."""
    error = kind("the shop did not answer")
    error.add_note("it is closed")

    def ask() -> None:
        raise error from KeyError("a")

    with pytest.raises(kind) as caught:
        asyncio.run(in_thread(ask))
    assert caught.value is error
    assert isinstance(error.__cause__, KeyError)
    assert "ask" in [entry.name for entry in caught.traceback]
