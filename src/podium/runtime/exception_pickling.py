"""Exceptions on their way from one process to another.

An exception is not pickled as its class says, because that class may end the process where the exception is pickled, or
the script where it is made anew. It is made anew of its class, its arguments and its attributes: its ``__init__`` and
``__reduce__`` are not called. Of values among these that a user's function would pickle or make anew, the text is sent.
"""

from __future__ import annotations

import abc
import copyreg
import io
import pickle
import sys
from contextlib import suppress
from enum import EnumMeta
from itertools import chain
from types import MemberDescriptorType
from typing import Any, Final, Generic, Protocol, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs] - it has none

from podium.exceptions import cause_of, has_long_chain, is_readable, read_text

_TRUSTED: Final = frozenset({*sys.stdlib_module_names, "podium", "torch", "numpy"}) - {"__main__"}
_HOOKS: Final = (
    *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__", "__new__"),
    *("__getattr__", "__getattribute__", "__setattr__", "__class__", "__hash__"),
)  # of a class, which are called where its objects are pickled or made anew
_GENERATED: Final = ("__hash__", "__setattr__")  # by dataclass, of a text
_PLAIN_BASES: Final = (object, abc.ABC, Generic, Protocol)  # which make no object anew by calling its class
_SLOTS: Final = ("name", "path", "filename", "filename2")  # of Python's own classes: neither arguments nor attributes
_arguments: Final[Any] = BaseException.__dict__["args"]
_attributes: Final[Any] = BaseException.__dict__["__dict__"]
_cause: Final[Any] = BaseException.__dict__["__cause__"]


def pack_exception(error: BaseException | None) -> bytes | None:
    """Return ``error`` as bytes; None for what cannot be made anew elsewhere, or cannot be printed there.

    One with causes or slots is there twice, with and without them: what cannot be sent or made anew in a cause, such as
    the connection of an HTTPError, does not keep the exception itself from arriving.
    """
    try:
        if error is None or not is_readable(error):
            return None
    except BaseException:  # noqa: BLE001 - a class may raise anything while it is printed
        return None
    complete, has_more = _pack(error, is_bare=False)
    bare = _pack(error, is_bare=True)[0] if has_more else None
    forms = [form for form in (complete, bare) if form is not None]
    return pickle.dumps(forms) if forms else None


def _pack(error: BaseException, *, is_bare: bool) -> tuple[bytes | None, bool]:
    """The exception as bytes, and whether causes or slots were met, which the bare form has not."""
    buffer = io.BytesIO()
    pickler = _ExceptionPickler(buffer, 5)
    pickler.is_bare = is_bare
    try:
        pickler.dump(error)  # pyright: ignore[reportUnknownMemberType]
    except BaseException:  # noqa: BLE001 - a class may raise anything while it pickles; the text goes in its place
        return None, pickler.has_more
    return buffer.getvalue(), pickler.has_more


def unpack_exception(data: bytes | None) -> BaseException | None:
    """Return the exception again, or None where its class is not there or refuses."""
    forms = _load(data)
    errors = map(_load, cast("list[bytes]", forms) if isinstance(forms, list) else ())
    return next((error for error in errors if isinstance(error, BaseException)), None)


def _load(data: bytes | None) -> object:
    try:
        return None if data is None else pickle.loads(data)
    except (Exception, SystemExit, GeneratorExit):  # noqa: BLE001 - a module or class raises anything; not Ctrl-C
        return None


class _ExceptionPickler(cloudpickle.CloudPickler):
    is_bare = False
    has_more = False

    def reducer_override(self, obj: Any) -> Any:
        kind = cast("type[Any]", type(obj))
        if issubclass(kind, type):
            is_inert = _is_inert_class(cast("type[Any]", obj))
        elif issubclass(kind, BaseException):
            slots, cause = _list_slots(kind), _find_cause(obj)
            self.has_more = self.has_more or bool(slots) or cause is not None
            return _take_apart(obj, *(([], None) if self.is_bare else (slots, cause)))
        else:
            is_inert = _is_inert_class(kind) and _makes_inert_objects(kind)
        if is_inert:
            return super().reducer_override(obj)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return str, (read_text(ValueError(obj)),)


def _is_inert_class(kind: type) -> bool:
    """Whether a class is found or made anew elsewhere without a call of a user's function."""
    if not _is_of_library(type(kind)):
        return False
    is_found = kind.__module__ != "__main__" and "<locals>" not in kind.__qualname__
    return is_found or (not isinstance(kind, EnumMeta) and _is_trusted(kind, "__init_subclass__"))


def _makes_inert_objects(kind: type) -> bool:
    """Whether objects of a class are pickled and made anew without a call of a user's function."""
    reduce = copyreg.dispatch_table.get(kind)
    if reduce is not None and (getattr(reduce, "__module__", None) or "").partition(".")[0] not in _TRUSTED:
        return False
    if _is_of_library(kind):
        return True
    bases = [base for base in kind.__mro__ if _is_of_library(base)]
    is_plain = isinstance(kind, EnumMeta) or all(base in _PLAIN_BASES for base in bases)
    return is_plain and all(_is_trusted(kind, hook) for hook in _HOOKS)


def _is_of_library(kind: type) -> bool:
    """Whether a class is Python's, Podium's or of a library that Podium needs."""
    return str(type.__dict__["__module__"].__get__(kind)).partition(".")[0] in _TRUSTED


def _is_trusted(kind: type, hook: str) -> bool:
    """Whether the method of a class is Python's or a library's own, or was generated for a class of data."""
    owner = next((cls for cls in kind.__mro__ if hook in vars(cls)), object)
    method = vars(owner).get(hook)
    if hook in _GENERATED and "__dataclass_fields__" in vars(owner):
        return getattr(getattr(method, "__code__", None), "co_filename", "<string>") == "<string>"
    module = getattr(method, "__module__", None) or owner.__module__
    return method is None or module.partition(".")[0] in _TRUSTED


def _take_apart(error: BaseException, own_slots: list[str], cause: BaseException | None) -> tuple[Any, ...]:
    slots: dict[str, Any] = {}
    for name in (*_SLOTS, *own_slots):
        with suppress(AttributeError):  # nobody has set it
            if (slot := _find_slot(type(error), name)) is not None and (value := slot.__get__(error)) is not None:
                slots[name] = value
    state = {"attributes": dict(_attributes.__get__(error)), "slots": slots, "cause": cause}
    return _make, (type(error), _arguments.__get__(error)), state, None, None, _complete


def _find_cause(error: BaseException) -> BaseException | None:
    """The exception that ``error`` was raised from, unless it cannot be printed or is the last of a long chain."""
    cause = cause_of(error)
    return cause if cause is not None and is_readable(cause) and not has_long_chain(error) else None


def _list_slots(kind: type[BaseException]) -> list[str]:
    """The names that classes of users have in ``__slots__``."""
    members = (vars(cls).items() for cls in kind.__mro__ if cls.__module__ != "builtins")
    return [name for name, value in chain.from_iterable(members) if type(value) is MemberDescriptorType]


def _find_slot(kind: type[BaseException], name: str) -> Any:
    for cls in kind.__mro__:
        slot = vars(cls).get(name)
        if slot is not None and (cls.__module__ == "builtins" or type(slot) is MemberDescriptorType):
            return slot
    return None


def _builtin(kind: type[BaseException]) -> type[BaseException]:
    """The nearest class of Python's own."""
    return next(cls for cls in kind.__mro__ if cls.__module__ == "builtins" and issubclass(cls, BaseException))


def _make(kind: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    builtin = _builtin(kind)
    try:
        error = builtin.__new__(kind, *arguments)
        builtin.__init__(error, *arguments)
    except TypeError:  # the class gives its base other arguments
        error = builtin.__new__(kind)
    _arguments.__set__(error, arguments)
    return error


def _complete(error: BaseException, state: dict[str, Any]) -> None:
    _attributes.__get__(error).update(state["attributes"])
    if state["cause"] is not None:
        _cause.__set__(error, state["cause"])
    for name, value in state["slots"].items():
        _find_slot(type(error), name).__set__(error, value)
