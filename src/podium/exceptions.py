"""The text of exceptions of code that is not Podium's.

The class of an exception may run anything where the exception is shown. So Podium shows it by these functions alone,
which return in any case. :mod:`podium.runtime.exception_pickling` brings exceptions to other processes.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

LONGEST_TEXT: Final = 20_000
"""Characters of an exception's text. A longer text is cut in the middle."""

_LONGEST_TRACEBACK: Final = 200_000
_MOST_LINES: Final = 200_000  # that the class of an exception executes to write its text
_MOST_CAUSES: Final = 100
cause_of: Final[Callable[[BaseException], BaseException | None]] = vars(BaseException)["__cause__"].__get__
_context_of: Final[Callable[[BaseException], BaseException | None]] = vars(BaseException)["__context__"].__get__
_name_of: Final[Callable[[type], str]] = type.__dict__["__name__"].__get__  # a metaclass may have another
_UNCOUNTED: Final = frozenset({traceback.__file__, linecache.__file__, contextlib.__file__, __file__})


def read_text(error: BaseException) -> str:
    """Return the text of ``error``. Words that say so replace a text that cannot be read or does not end, and a text of
    more than ``LONGEST_TEXT`` characters is cut in the middle.

    >>> read_text(ValueError("no number"))
    'no number'
    """
    text, raised = _ask(lambda: str(error))
    return _cut(text, LONGEST_TEXT) if raised is None else f"its text cannot be read: __str__ raises {raised}"


def is_readable(error: BaseException) -> bool:
    """Whether ``error`` has a text of a usual length, so that whoever gets the exception can print it."""
    text, raised = _ask(lambda: str(error) + repr(error))
    return raised is None and len(text) <= _LONGEST_TRACEBACK


def describe_error(error: BaseException) -> str:
    """Return the name of the class of ``error``, and its text.

    >>> describe_error(ValueError("no number"))
    'ValueError: no number'
    """
    return f"{name_class(error)}: {read_text(error)}".removesuffix(": ")


def name_class(error: BaseException) -> str:
    """Return the name of the class of ``error``."""
    return str.__str__(_name_of(type(error)))


def format_error(error: BaseException, trace: TracebackType | None = None) -> str:
    """Return the traceback of ``error`` with its causes, as Python prints it; without the causes if they are more than
    100.

    Args:
        error: The exception.
        trace: The first step to show; None shows all of them.
    """
    trace = error.__traceback__ if trace is None else trace
    text = ""
    if not has_long_chain(error):
        text, _ = _ask(lambda: "".join(traceback.format_exception(type(error), error, trace)))
    if not text:
        text = f"{''.join(traceback.format_tb(trace))}{describe_error(error)}\n"
    return _cut(text, _LONGEST_TRACEBACK)


def has_long_chain(error: BaseException) -> bool:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(seen) <= _MOST_CAUSES:
        seen.add(id(link))
        cause = cause_of(link)
        link = _context_of(link) if cause is None else cause  # a class may have a truth of its own
    return len(seen) > _MOST_CAUSES


def _ask(read: Callable[[], str]) -> tuple[str, str | None]:
    """Return what ``read`` returns as a plain text that can be encoded; or "" and the name of what it raises."""
    left, is_debugged = _MOST_LINES, sys.gettrace() is not None

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename in _UNCOUNTED:
            return None
        left -= 1
        if left < 0:
            raise _EndlessError
        return count

    try:
        if not is_debugged:
            sys.settrace(count)
        try:
            text = read()
        finally:
            if not is_debugged:
                sys.settrace(None)
        return str.encode(text, "utf-8", "backslashreplace").decode(), None
    except _EndlessError:
        return "", "nothing and does not end"
    except BaseException as raised:  # noqa: BLE001 - a class may raise anything, SystemExit and KeyboardInterrupt too
        return "", name_class(raised)


class _EndlessError(BaseException):
    """The text of an exception does not end."""


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]}\n… {len(text) - longest:,} more characters …\n{text[-(longest - longest // 2) :]}"
