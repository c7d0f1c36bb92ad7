"""The keys that a function reads of a mapping, found in its code without running it."""

import dis
from types import CodeType
from typing import Final

__all__ = ["list_read_keys"]

_SKIPPED: Final = frozenset({"CACHE", "PUSH_NULL", "NOP", "EXTENDED_ARG"})


def list_read_keys(code: CodeType | None, variable: str) -> list[str]:
    """Return the constant texts by which ``code``, or a function within it, reads ``variable[key]`` or
    ``variable.get(key)``.

    >>> def score(completion, row): return row["answer"] == completion or row.get("other")
    >>> list_read_keys(score.__code__, "row")
    ['answer', 'other']
    """
    if code is None:
        return []
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED]
    keys: list[str] = []
    for number, step in enumerate(steps):
        loaded = step.argval[-1] if step.argval and isinstance(step.argval, tuple) else step.argval
        if not ("LOAD_FAST" in step.opname or "LOAD_DEREF" in step.opname) or loaded != variable:
            continue
        following = steps[number + 1 : number + 4]
        if following and following[0].argval == "get" and following[0].opname in ("LOAD_METHOD", "LOAD_ATTR"):
            keys += [step.argval for step in following[1:2] if isinstance(step.argval, str)]
        elif len(following) > 1 and following[1].opname.startswith("BINARY_") and "LOAD_CONST" in following[0].opname:
            keys += [step.argval for step in following[:1] if isinstance(step.argval, str)]
    for constant in code.co_consts:
        keys += list_read_keys(constant, variable) if isinstance(constant, CodeType) else []
    return list(dict.fromkeys(keys))
