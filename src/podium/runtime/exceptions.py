"""Exceptions on their way from one process to another.

An exception is not pickled as its class says, because that class may end the process where the exception is pickled, or
the script where it is made anew. It is made anew of its class, its arguments and its attributes: its ``__init__`` and
``__reduce__`` are not called. Of values among these that are made anew by a user's function, the text is sent.
"""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any, Final, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs] - it has none

from podium.exceptions import is_readable, read_text

__all__ = ["pack_exception", "unpack_exception"]

_TRUSTED: Final = frozenset({*sys.stdlib_module_names, "podium", "torch", "numpy"}) - {"__main__"}
_HOOKS: Final = ("__reduce__", "__reduce_ex__", "__setstate__", "__new__")
_SLOTS: Final = ("name", "path", "filename", "filename2")  # of Python's own classes: neither arguments nor attributes
_arguments: Final[Any] = BaseException.__dict__["args"]
_attributes: Final[Any] = BaseException.__dict__["__dict__"]


def pack_exception(error: BaseException | None) -> bytes | None:
    """Return ``error`` as bytes; None for what cannot be made anew elsewhere, or cannot be printed there."""
    try:
        if error is None or not is_readable(error):
            return None
        buffer = io.BytesIO()
        _ExceptionPickler(buffer, 5).dump(error)  # pyright: ignore[reportUnknownMemberType]
        return buffer.getvalue()
    except BaseException:  # noqa: BLE001 - a class may raise anything while it pickles; the text goes in its place
        return None


def unpack_exception(data: bytes | None) -> BaseException | None:
    """Return the exception again, or None where its class is not there or refuses."""
    try:
        error = None if data is None else pickle.loads(data)
    except (Exception, SystemExit, GeneratorExit):  # noqa: BLE001 - a module or class raises anything; not Ctrl-C
        return None
    return error if isinstance(error, BaseException) else None


class _ExceptionPickler(cloudpickle.CloudPickler):
    def reducer_override(self, obj: Any) -> Any:
        kind = cast("type[Any]", type(obj))
        if issubclass(kind, BaseException):
            return _take_apart(obj)
        if issubclass(kind, type) or callable(obj) or all(_is_trusted(kind, hook) for hook in _HOOKS):
            return super().reducer_override(obj)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return str, (read_text(ValueError(obj)),)


def _is_trusted(kind: type, hook: str) -> bool:
    """Whether what makes an object of ``kind`` anew is Python's or a library's own."""
    owner = next((cls for cls in kind.__mro__ if hook in vars(cls)), object)
    module = getattr(vars(owner).get(hook), "__module__", None) or owner.__module__
    return module.partition(".")[0] in _TRUSTED


def _take_apart(error: BaseException) -> tuple[Any, ...]:
    descriptors = {name: _find_slot(type(error), name) for name in _SLOTS}
    slots = {
        name: value
        for name, slot in descriptors.items()
        if slot is not None and (value := slot.__get__(error)) is not None
    }
    state = {"attributes": dict(_attributes.__get__(error)), "slots": slots}
    return _make, (type(error), _arguments.__get__(error)), state, None, None, _complete


def _find_slot(kind: type[BaseException], name: str) -> Any:
    return next((vars(cls)[name] for cls in kind.__mro__ if cls.__module__ == "builtins" and name in vars(cls)), None)


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


def _complete(error: BaseException, state: dict[str, dict[str, Any]]) -> None:
    _attributes.__get__(error).update(state["attributes"])
    for name, value in state["slots"].items():
        _find_slot(type(error), name).__set__(error, value)
