"""The text of an exception is read whatever its class does, and the exception arrives without its class being asked."""

from __future__ import annotations

import asyncio
import copyreg
import io
import logging
import os
import sys
import threading
import urllib.error
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from email.message import Message
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

import podium
from podium.errors import EndpointError
from podium.exceptions import describe_error, format_error, is_readable, read_text
from podium.functions import load_function
from podium.rewards.call_forms import Item
from podium.rewards.reward_functions import RewardFunctions, call_rewards
from podium.runtime import Worker, endpoint
from podium.runtime.exception_pickling import pack_exception, unpack_exception
from podium.telemetry import Bus, Event, Note
from podium.telemetry.sinks.base import Sink
from podium_agents.environments.tools import Toolbox

LARGE = 3_000_000


class Text(Exception):
    """An exception whose text is what a function makes."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __str__(self) -> Any:
        return self.make()

    __repr__ = __str__


def leave(error: type[BaseException]) -> NoReturn:
    raise error


def recurse() -> Any:
    return recurse()


def spin() -> str:
    while True:
        pass


def grow() -> str:
    return "".join("x" for _ in iter(int, 1))


class Odd(str):
    def __getitem__(self, key: Any) -> Any:
        raise ValueError

    def __format__(self, spec: str) -> Any:
        raise ValueError

    def encode(self, *arguments: Any, **options: Any) -> Any:
        raise ValueError


TEXTS: dict[str, Callable[[], Any]] = {
    "raises": lambda: leave(ValueError),
    "exits": lambda: leave(SystemExit),
    "interrupts": lambda: leave(KeyboardInterrupt),
    "ends a generator": lambda: leave(GeneratorExit),
    "is no text": lambda: 3,
    "recurses": recurse,
    "spins": spin,
    "grows": grow,
    "is long": lambda: "x" * LARGE,
    "is odd": lambda: Odd("x"),
    "is no Unicode": lambda: "\ud800",
}


class NameOfClass(type):
    @property
    def __name__(cls) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise ValueError


class OddClass(Exception, metaclass=NameOfClass):
    __module__ = 3  # type: ignore[assignment] # what an exception may bring

    @property
    def __cause__(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise ValueError

    @property
    def __notes__(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise ValueError


def circle() -> BaseException:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    return first


def noted(notes: Any) -> BaseException:
    error = ValueError("noted")
    error.__notes__ = notes
    return error


def deep_group() -> BaseException:
    group: Any = Text(TEXTS["raises"])
    for _ in range(2_000):
        group = BaseExceptionGroup("group", [group])
    return group


def long_chain() -> BaseException:
    error: BaseException = ValueError("0")
    for number in range(20_000):
        error, error.__context__ = ValueError(str(number)), error
    return error


ODD: dict[str, Callable[[], BaseException]] = {
    **{f"text {name}": lambda make=make: Text(make) for name, make in TEXTS.items()},
    **{f"group of {name}": lambda make=make: ExceptionGroup("g", [Text(make)]) for name, make in TEXTS.items()},
    "odd class": OddClass,
    "circle": circle,
    "notes of numbers": lambda: noted([1, 2]),
    "notes": lambda: noted(7),
    "notes that raise": lambda: noted([Text(TEXTS["exits"])]),
    "deep group": deep_group,
    "long chain": long_chain,
}


UNREADABLE = {f"{what} {name}" for name in [*TEXTS][:9] for what in ("text", "group of")} | {"deep group"}


@pytest.mark.parametrize("kind", ODD)
def test_any_exception_is_shown(kind: str) -> None:
    error = ODD[kind]()
    for text in (read_text(error), describe_error(error), format_error(error)):
        assert type(text) is str
        assert len(text.encode()) < 1_000_000
    assert describe_error(error).startswith(type.__dict__["__name__"].__get__(type(error)))
    assert sys.gettrace() is None
    readable = is_readable(error)
    del error  # which pytest would show
    assert readable == (kind not in UNREADABLE)


def test_usual_exceptions_are_shown_as_python_shows_them() -> None:
    try:
        try:
            raise ExceptionGroup("several", [ValueError("a"), OSError(2, "no file", "x.txt")])
        except ExceptionGroup as inner:
            raise KeyError("outer") from inner
    except KeyError as error:
        import traceback

        assert format_error(error) == traceback.format_exc()
        assert describe_error(error) == "KeyError: 'outer'"
    assert describe_error(ValueError()) == "ValueError"


# -- to another process ----------------------------------------------------------------------------------------------


class Reduced(Exception):
    """An exception that is made anew by a function."""

    def __reduce__(self) -> Any:
        return self.args[0] if len(self.args) == 1 else super().__reduce__()


class Leaving(Exception):
    def __reduce__(self) -> Any:
        os._exit(77)


class Color(Enum):
    RED = 1


@dataclass(frozen=True)
class Point:
    x: int
    color: Color


class Value:
    """A value of an exception that is made anew by a function."""

    def __reduce__(self) -> Any:
        return os._exit, (77,)


class State:
    def __setstate__(self, state: Any) -> None:
        os._exit(77)


class Needs(OSError):
    def __init__(self, name: str, number: int) -> None:
        super().__init__(name)
        self.number = number


class Constructor(Exception):
    def __init__(self, *arguments: Any) -> None:
        if arguments:
            raise RuntimeError("it is made once")


def end(*_: Any, **__: Any) -> Any:
    os._exit(77)


class Callable_:
    __reduce__ = end

    def __call__(self) -> None:
        pass


class Registered:
    pass


copyreg.pickle(Registered, end)  # type: ignore[arg-type] - it ends the process


class Getstate:
    __getstate__ = end


class Newargs:
    __getnewargs__ = end


class Hashed:
    """A key: a mapping that is made anew asks for its hash once more."""

    asked = False

    def __hash__(self) -> int:
        return end() if Hashed.asked else 1


class Slots:
    __slots__ = ("value",)

    def __init__(self) -> None:
        object.__setattr__(self, "value", 1)

    __setattr__ = end


class Entries(dict[str, int]):
    def __init__(self) -> None:
        dict.__init__(self, a=1)

    __setitem__ = end


class Items(list[int]):
    def __init__(self) -> None:
        list.__init__(self, [1, 2])

    append = extend = __iter__ = end  # type: ignore[assignment] - they end the process


class Ordered(OrderedDict[str, int]):
    """One whose class is called where it is made anew."""

    is_made = False

    def __init__(self) -> None:
        if Ordered.is_made:
            end()
        Ordered.is_made = True


class ClassOf:
    __class__ = property(end)  # type: ignore[assignment] - it ends the process


def make_local(of_class: bool) -> Any:
    """An object of a class that is sent as it is, since nobody can import it, and its class or base runs code."""
    armed: list[bool] = []

    class Meta(type):
        def __init__(cls, *arguments: Any) -> None:
            if armed:
                end()

    class Base:
        def __init_subclass__(cls) -> None:
            if armed:
                end()

    class OfMeta(metaclass=Meta):
        pass

    class OfBase(Base):
        pass

    armed.append(True)
    return OfMeta() if of_class else OfBase()


def make_key() -> Any:
    Hashed.asked = False
    keys = {Hashed(): 1}
    Hashed.asked = True
    return keys


def make_ordered() -> Any:
    Ordered.is_made = False
    return Ordered()


VALUES: dict[str, Callable[[], Any]] = {
    "callable": Callable_, "registered": Registered, "getstate": Getstate, "newargs": Newargs, "key": make_key,
    "slots": Slots, "dict": Entries, "list": Items, "ordered": make_ordered, "class": ClassOf,
    "metaclass": lambda: make_local(True), "base": lambda: make_local(False), "method": lambda: Callable_().__call__,
}  # fmt: skip

PACKED: dict[str, Callable[[], BaseException]] = {
    **{f"value: {kind}": lambda kind=kind: ValueError("x", VALUES[kind]()) for kind in VALUES},
    **{f"attribute: {kind}": lambda kind=kind: with_value(VALUES[kind]()) for kind in VALUES},
    "ends the process": lambda: Reduced((os._exit, (77,))),
    "ends the process in a function": lambda: Reduced((lambda: os._exit(77), ())),
    "ends where it is pickled": lambda: Leaving("x"),
    "garbage": lambda: Reduced(7),
    "a text": lambda: Reduced("nowhere"),
    "another type": lambda: Reduced((int, ("3",))),
    "a value": lambda: ValueError(Value()),
    "a nested value": lambda: ValueError({"a": [Value()]}),
    "a state": lambda: ValueError(State()),
    "in a group": lambda: ExceptionGroup("g", [Reduced((os._exit, (77,))), Leaving("y")]),
    "arguments": lambda: Needs("x", 2),
    "a constructor": lambda: _with_arguments(Constructor()),
}


class Slotted(Exception):
    __slots__ = ("value",)

    def __init__(self, text: str, value: int) -> None:
        super().__init__(text)
        self.value = value


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def with_value(value: Any) -> BaseException:
    error = ValueError("x")
    error.value = value  # type: ignore[attr-defined] - an attribute of its own
    return error


def _with_arguments(error: BaseException) -> BaseException:
    error.args = (1, 2)
    return error


@pytest.mark.parametrize("kind", PACKED)
def test_an_exception_is_made_anew_without_its_class_being_asked(kind: str) -> None:
    error = PACKED[kind]()
    again = unpack_exception(pack_exception(error))
    assert type(again) is type(error)
    if kind == "arguments":
        assert (again.args, again.number) == (("x",), 2)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "error",
    [
        OSError(2, "no file", "x.txt"),
        KeyError("k"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ImportError("m", name="n", path="p"),
        StopIteration(3),
        SystemExit(4),
        ExceptionGroup("g", [ValueError(1), ExceptionGroup("h", [KeyError(2)])]),
        SyntaxError("bad", ("f.py", 1, 2, "x =", 1, 3)),
        noted(["a note"]),
        with_value([Path("x"), {1: Decimal("2")}, Point(1, Color.RED), {Point(1, Color.RED): 2}]),
        EndpointError("e", method="m", rank=3, remote_traceback="t"),
        caused(RuntimeError("outer"), caused(ValueError("inner"), OSError(2, "no file", "x.txt"))),
        Slotted("x", 7),
    ],
    ids=lambda error: type(error).__name__,
)
def test_usual_exceptions_arrive_as_they_are(error: BaseException) -> None:
    again = unpack_exception(pack_exception(error))
    assert again is not None
    assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)
    for name in ("errno", "filename", "name", "path", "value", "code", "lineno", "reason"):
        assert getattr(again, name, None) == getattr(error, name, None)
    while error.__cause__ is not None:
        error, again = error.__cause__, again.__cause__
        assert again is not None
        assert (repr(again), str(again)) == (repr(error), str(error))


def test_a_chain_of_causes_that_is_long_or_a_ring_ends() -> None:
    error = first = ValueError(0)
    for number in range(1, 200):
        error = caused(ValueError(number), error)
    assert repr(unpack_exception(pack_exception(error))) == "ValueError(199)"
    first.__cause__ = error.__cause__
    assert repr(unpack_exception(pack_exception(error))) == "ValueError(199)"


def test_a_cause_or_slot_that_cannot_be_sent_leaves_its_error_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as an HTTPError with its connection, or a cause of a library that is installed for the workers alone."""
    locked, absent = ValueError("inner"), type("Absent", (Exception,), {"__module__": "only_there"})
    locked.lock = threading.Lock()  # type: ignore[attr-defined] - an attribute of its own
    answer = urllib.error.HTTPError("http://x", 503, "busy", Message(), io.BytesIO())
    answer.connection = threading.Lock()  # type: ignore[attr-defined] - as a socket, it does not pickle
    for cause in (locked, answer, caused(KeyError(7), StopIteration(letter for letter in "ab"))):
        again = unpack_exception(pack_exception(caused(EndpointError("outer", method="m", rank=3), cause)))
        assert isinstance(again, EndpointError)
        assert (again.rank, str(again), again.__cause__) == (3, "outer", None)
    monkeypatch.setitem(sys.modules, "only_there", ModuleType("only_there"))
    sys.modules["only_there"].Absent = absent  # type: ignore[attr-defined] - a module of its own
    packed = pack_exception(caused(RuntimeError("outer"), absent("inner")))
    monkeypatch.delitem(sys.modules, "only_there")
    assert repr(unpack_exception(packed)) == "RuntimeError('outer')"
    again = unpack_exception(pack_exception(Slotted("x", threading.Lock())))  # type: ignore[arg-type] - for no value
    assert repr(again) == "Slotted('x')"
    assert not hasattr(again, "value")


def test_groups_that_have_their_causes_in_common_are_packed_once() -> None:
    """By each of the two members alone, the first cause would be packed 2**30 times."""
    error: Exception = ValueError("first")
    for number in range(30):
        first, second = ValueError(f"a{number}"), ValueError(f"b{number}")
        first.__cause__ = second.__cause__ = error
        error = ExceptionGroup("g", [first, second])
    packed = pack_exception(error)
    assert packed is not None
    assert len(packed) < 100_000
    assert repr(unpack_exception(packed)) == repr(error)


def test_bytes_that_are_no_exception_are_none() -> None:
    assert unpack_exception(b"") is unpack_exception(None) is None
    assert all(pack_exception(Text(make)) is None for make in [*TEXTS.values()][:9])


class Odds(Worker):
    """Raises what it is asked for."""

    @endpoint
    def show(self, kind: str) -> None:
        raise {**ODD, **PACKED}[kind]()

    @endpoint
    async def wait(self, kind: str) -> None:
        raise {**ODD, **PACKED}[kind]()

    @endpoint
    def leave(self, name: str) -> None:
        raise {"SystemExit": SystemExit, "GeneratorExit": GeneratorExit, "KeyboardInterrupt": KeyboardInterrupt}[name]

    @endpoint
    def make(self) -> Any:
        return Leaving2()

    @endpoint
    def ping(self) -> int:
        return os.getpid()


class Leaving2:
    def __reduce__(self) -> Any:
        raise SystemExit(3)


BACKENDS = ["inline", "local", pytest.param("ray", marks=pytest.mark.ray)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_exception_ends_a_worker_or_the_script(backend: str) -> None:
    with podium.connect(backend) as cluster:
        odds = cluster.start(Odds.bind(), cluster.pool([1], cpus=1))
        (pid,) = odds.ping()
        for kind in [*ODD, *PACKED]:
            for method in (odds.show, odds.wait):
                with pytest.raises(EndpointError, match=r"rank 0") as caught:
                    method(kind)
                assert "Traceback" in caught.value.remote_traceback or "raise" in caught.value.remote_traceback
                assert caught.value.__cause__ is None or is_readable(caught.value.__cause__)
        with pytest.raises(EndpointError, match="does not pickle: SystemExit"):
            odds.make()
        for name in ("SystemExit", "GeneratorExit", "KeyboardInterrupt"):
            if (backend, name) != ("inline", "KeyboardInterrupt"):  # which is the script's own Ctrl-C
                with pytest.raises(EndpointError, match=name):
                    odds.leave(name)
        assert odds.ping() == [pid]


# -- rewards, tools, listeners ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*ODD, *PACKED])
def test_a_reward_that_raises_it_has_failed(kind: str) -> None:
    def score(completion: str) -> float:
        raise {**ODD, **PACKED}[kind]()

    result = call_rewards(RewardFunctions([score], (), frozenset({"prompt"}), 1), Item("text", {"prompt": ""}, {}))
    assert result.problem.startswith("raised ")
    result.problem.encode()


@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize("kind", ["text raises", "text exits", "text spins", "text is long", "odd class", "circle"])
def test_a_tool_that_raises_it_answers_with_an_error(kind: str, process: bool) -> None:
    def look_up(word: str) -> str:
        """Look a word up."""
        raise ODD[kind]()

    from podium_agents.environments.tools import tool

    box = Toolbox([tool(look_up, process=process)])
    call = {"id": "1", "function": {"name": "look_up", "arguments": '{"word": "a"}'}}
    (message,) = asyncio.run(box.answer([call]))
    assert message["content"].startswith("error: ")
    assert len(message["content"]) < 100_000


@pytest.mark.parametrize("kind", ODD)
def test_a_listener_that_raises_it_gets_no_more_events(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def listen(event: object) -> None:
        raise ODD[kind]()

    bus = Bus()
    bus.subscribe(listen)
    with caplog.at_level(logging.ERROR):
        bus.emit(Note("x"))
    assert "gets no more events" in caplog.text
    assert not bus.active()


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit])
def test_a_listener_that_leaves_ends_no_run(error: type[BaseException], tmp_path: Path) -> None:
    bus = Bus()
    bus.subscribe(lambda event: leave(error))
    bus.emit(Note("x"))
    assert not bus.active()


def test_an_end_by_a_signal_passes_listeners_and_what_explains_a_users_code(tmp_path: Path) -> None:
    class Interrupted(Sink):
        def handle(self, event: Event) -> None:
            raise KeyboardInterrupt

    bus = Bus()
    bus.subscribe(lambda event: leave(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        bus.emit(Note("x"))
    assert bus.active()
    sink = Interrupted()
    sink(Note("x"))
    with pytest.raises(KeyboardInterrupt):
        sink.flush()
    (tmp_path / "reward.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_function(f"{tmp_path / 'reward.py'}:reward", key="reward.name")
