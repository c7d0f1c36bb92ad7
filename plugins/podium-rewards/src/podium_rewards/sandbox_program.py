"""The program that runs in a sandbox. It needs nothing but Python's standard library, and is started as a file.

    solve   reads the solution, runs it, and answers calls of its functions, one after another
    test    reads tests, and runs each with the solution's functions in its namespace, which are calls to ``solve``
    inputs  runs the solution once for each input, in a process of its own, and reports what it wrote

The solution and the tests are in different sandboxes. What passes between them is plain data, so a solution can change
nothing in the process that compares: neither ``==`` nor ``assert``, nor the verdict itself.
"""

import ast
import builtins
import contextlib
import importlib
import io
import json
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import typing
from collections.abc import Iterator
from typing import Any

_HEAD = struct.Struct("<I")
_MOST_BYTES = 1 << 24  # of one call or its result
_ALIASES = {"np": "numpy", "pd": "pandas"}
_ENDS_LOOPS = (StopIteration, StopAsyncIteration)


class Link:
    """Frames of JSON over a socket."""

    def __init__(self, fd: int) -> None:
        self._file = socket.socket(fileno=fd).makefile("rwb")

    def send(self, value: Any) -> None:
        """Send plain data."""
        data = json.dumps(value).encode()
        self._file.write(_HEAD.pack(len(data)) + data)
        self._file.flush()

    def receive(self) -> Any:
        """Return the next plain data. Raises EOFError once the other side has ended."""
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size or _HEAD.unpack(head)[0] > _MOST_BYTES:
            raise EOFError("the solution has ended")
        data = self._file.read(_HEAD.unpack(head)[0])
        return json.loads(data)


def _describe(error: BaseException) -> str:
    """Return the class of an exception, and its text."""
    return f"{type(error).__name__}: {_read_text(error)}"


def _read_text(error: BaseException) -> str:
    """Return the first 500 characters of an exception's text, whatever the ``__str__`` of its class does."""
    try:
        return str(error)[:500]
    except Exception:  # noqa: BLE001 - the solution's own code
        return "its text cannot be read"


def write_value(value: Any, objects: list[Any] | None = None) -> Any:
    """Write a value as JSON with its type. What is no plain data is kept in ``objects``, and travels as its number.

    Raises:
        TypeError: It is no plain data, and there are no ``objects``.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind in (int, float):
        return {"n": repr(value), "t": kind.__name__}
    if kind in (complex, bytes, range):
        return {"n": repr(value), "t": kind.__name__}
    if kind in (list, tuple, set, frozenset):
        return {"t": kind.__name__, "v": [write_value(item, objects) for item in value]}
    if kind is dict:
        return {"t": "dict", "v": [[write_value(k, objects), write_value(v, objects)] for k, v in value.items()]}
    if kind is Remote:
        return {"t": "object", "v": value._number}
    if objects is None:
        raise TypeError(f"a {kind.__name__} cannot be sent to the solution")
    objects.append(value)
    return {"t": "remote", "v": len(objects) - 1}


def read_value(value: Any, link: Link | None, objects: list[Any] | None = None) -> Any:
    """Read what :func:`write_value` wrote. It makes plain data, handles of objects of the other side, and no more.

    Raises:
        ValueError: It was written by something else.
    """
    if value is None or type(value) in (bool, str):
        return value
    kind = value["t"]
    if kind in ("int", "float"):
        return (int if kind == "int" else float)(value["n"])
    if kind in ("complex", "bytes"):
        return complex(value["n"]) if kind == "complex" else ast.literal_eval(value["n"])
    if kind == "range":
        return range(*ast.literal_eval(value["n"].removeprefix("range")))
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)([read_value(item, link, objects) for item in value["v"]])
    if kind == "dict":
        return {read_value(k, link, objects): read_value(v, link, objects) for k, v in value["v"]}
    if kind == "object" and objects is not None:
        return objects[value["v"]]
    if kind == "remote" and link is not None:
        return Remote(link, int(value["v"]))
    raise ValueError(f"unknown data {kind!r}")


class Remote:
    """An object of the solution, which is equal to nothing but itself."""

    def __init__(self, link: Link, number: int) -> None:
        self._link, self._number = link, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it there."""
        return self._ask("call", write_value(list(args)), write_value(kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("list"))

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", write_value(key))

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other._number == self._number

    def __hash__(self) -> int:
        return hash(self._number)

    def _ask(self, *question: Any) -> Any:
        self._link.send([self._number, *question])
        answer = self._link.receive()
        if "raised" in answer:
            kind: Any = getattr(builtins, answer["raised"], None)
            # StopIteration would end a test's own loop, so that all(map(solve, inputs)) were true.
            is_error = isinstance(kind, type) and issubclass(kind, Exception) and kind not in _ENDS_LOOPS
            try:
                error = kind(answer["text"]) if is_error else RuntimeError(f"{answer['raised']}: {answer['text']}")
            except TypeError:
                error = RuntimeError(answer["text"])
            raise error
        return read_value(answer["value"], self._link)


def solve(code: str, fd: int, *, typed: bool = False) -> None:
    """Run the solution, and answer calls until the other side ends. With ``typed`` it has the names of ``typing``, as
    the code expects with which a data set of calls lets a solution begin."""
    link, objects = Link(fd), list[Any]()
    space: dict[str, Any] = {"__name__": "solution"}
    types = {name: getattr(typing, name) for name in typing.__all__ if typed}
    space |= types
    try:
        exec(compile(code, "solution.py", "exec"), space)
    except Exception as error:  # noqa: BLE001 - whatever the solution raises
        link.send({"failed": _describe(error)})
        return
    names = [name for name in space if not name.startswith("__") and space[name] is not types.get(name, types)]
    objects += [space[name] for name in names]
    link.send({"names": names})
    while True:
        try:
            number, verb, *rest = link.receive()
        except EOFError:
            return
        try:
            target = objects[number]
            match verb:
                case "call":
                    args, kwargs = (read_value(part, None, objects) for part in rest)
                    value = target(*args, **kwargs)
                case "get":
                    value = getattr(target, rest[0])
                case "item":
                    value = target[read_value(rest[0], None, objects)]
                case "len":
                    value = len(target)
                case "list":
                    value = list(target)
                case _:
                    value = str(target)
            answer = {"value": write_value(value, objects)}
        except Exception as error:  # noqa: BLE001 - whatever the solution raises
            answer = {"raised": type(error).__name__, "text": _read_text(error)}
        link.send(answer)


def test(tests: list[str], entry: str, fd: int) -> dict[str, Any]:
    """Run each of ``tests``, and return how many passed and what the first other one raised."""
    link = Link(fd)
    try:
        first = link.receive()
    except (EOFError, ValueError):
        return {"passed": 0, "problem": "the solution ended before it was called"}
    if "names" not in first:
        return {"passed": 0, "problem": str(first.get("failed"))[:500]}
    remote = {str(name): Remote(link, number) for number, name in enumerate(first["names"])}
    space = _namespace(remote, "\n".join(tests))
    space["_entry"] = lambda name: _find_entry(remote, name)
    passed, problem = 0, ""
    for text in tests:
        try:
            before = space.get("check")
            exec(compile(text, "tests.py", "exec"), space)
            if entry and (check := space.get("check")) is not None and check is not before:
                check(_find_entry(remote, entry))
            passed += 1
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a test raises, it has failed
            problem = problem or _describe(error)
            if isinstance(error, EOFError):
                break
    return {"passed": passed, "problem": problem}


def _find_entry(remote: dict[str, Any], name: str) -> Any:
    """A function of the solution, or the method of its class Solution."""
    if name in remote:
        return remote[name]
    if "Solution" in remote:
        return getattr(remote["Solution"](), name)
    raise NameError(f"the solution has no {name!r}")


def _namespace(remote: dict[str, Any], tests: str) -> dict[str, Any]:
    """The names of tests. A name of the solution stands for itself only if it cannot be one of Python or a library: a
    solution that calls a function of its own ``all`` or ``math`` would judge itself."""
    space: dict[str, Any] = {"__name__": "tests"}
    loaded = {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)}
    for name in loaded - {*dir(builtins)}:
        module = _ALIASES.get(name, name)
        if module in sys.stdlib_module_names or name in _ALIASES:
            with contextlib.suppress(ImportError):
                space[name] = importlib.import_module(module)
        elif name in remote:
            space[name] = remote[name]
    return space


def run_inputs(code: str, inputs: list[str], report: int, most_bytes: int) -> None:
    """Run the solution once for each input. Each report is a line of JSON with the output."""
    for text in inputs:
        with tempfile.TemporaryFile() as fed, tempfile.TemporaryFile() as written:
            fed.write(text.encode())
            fed.seek(0)
            if (child := os.fork()) == 0:
                os.close(report)
                os.dup2(fed.fileno(), 0)
                os.dup2(written.fileno(), 1)
                _run_script(code)
            _, status = os.waitpid(child, 0)
            written.seek(0)
            output = written.read(most_bytes).decode(errors="replace")
        line = json.dumps({"status": os.waitstatus_to_exitcode(status), "output": output})
        os.write(report, line.encode() + b"\n")


def _run_script(code: str) -> None:
    sys.stdin, sys.stdout = io.TextIOWrapper(io.FileIO(0)), io.TextIOWrapper(io.FileIO(1, "w"), write_through=True)
    status = 0
    try:
        exec(compile(code, "solution.py", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # noqa: BLE001 - whatever the solution raises
        sys.stderr.write(f"{_describe(error)}\n")
        status = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(status & 255)


def _limit(memory_bytes: int, seconds: int, file_bytes: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: seconds + 1,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def main() -> None:
    """Read a task from stdin, and do it."""
    task = json.load(sys.stdin)
    report = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    _limit(task["memory_bytes"], task["seconds"], task["file_bytes"])
    sys.path += task.get("paths", [])
    match task["what"]:
        case "solve":
            os.close(report)
            solve(task["code"], task["fd"], typed=task["typed"])
        case "test":
            os.write(report, json.dumps(test(task["tests"], task["entry"], task["fd"])).encode())
        case _:
            run_inputs(task["code"], task["inputs"], report, task["file_bytes"])


if __name__ == "__main__":
    main()
