"""What a reward function says of itself: its parameters, and the place of its code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from podium.annotations import signature_of


def is_unused(parameter: inspect.Parameter) -> bool:
    """Whether the name of a parameter says that nobody reads it."""
    return parameter.name.startswith("_") and parameter.default is parameter.empty


def list_partial_keywords(reward: Callable[..., Any]) -> frozenset[str]:
    """The parameters that functools.partial has given values."""
    names: set[str] = set()
    while isinstance(reward, functools.partial):
        names |= {*reward.keywords}
        reward = reward.func
    return frozenset(names)


def is_empty(default: Any) -> bool:
    """Whether a default says that there is no value."""
    return default is None or (isinstance(default, str | list | tuple | dict | set | frozenset) and not default)


def read_signature(reward: Callable[..., Any]) -> inspect.Signature:
    """The signature of a reward: a wrapper's own where it says what it takes, else that of what it wraps.

    Raises:
        TypeError, ValueError: It has none.
    """
    if inspect.isfunction(reward) and hasattr(reward, "__wrapped__"):
        signature = signature_of(reward, follow_wrapped=False)
        if not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in signature.parameters.values()):
            return signature
    return signature_of(reward)


def find_function(reward: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a callable calls."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return reward if hasattr(reward, "__code__") or hasattr(reward, "__func__") else type(reward).__call__


def describe_place(reward: Callable[..., Any]) -> str:
    """The file and the line of a function, in parentheses; "" where Python does not know them."""
    code = find_code(reward)
    if code is None:
        return ""
    path = Path(code.co_filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f" ({shown}, line {code.co_firstlineno})"


def list_texts(code: CodeType | None) -> list[str]:
    """The constant texts of a function's code, and of the functions within it."""
    constants = code.co_consts if code else ()
    inner = [text for constant in constants if isinstance(constant, CodeType) for text in list_texts(constant)]
    return [*(constant for constant in constants if isinstance(constant, str)), *inner]


def find_code(reward: Callable[..., Any]) -> CodeType | None:
    """The code of a function; None where Python does not know it."""
    function = inspect.unwrap(find_function(reward))
    return getattr(getattr(function, "__func__", function), "__code__", None)
