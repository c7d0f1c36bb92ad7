"""Fields of the data that belong to sessions with tools or environments, in a run that answers each prompt once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from podium.rollout.tasks import Example
from podium.runs.config import InferenceConfig
from podium.spelling import write_count

_FIELD: Final = re.compile(
    r"(need_)?(tools?|interaction|agent|env|environment)_(name|kwargs|args|config|class)|agent|environment|env"
)
_ONCE: Final = ("single_turn_agent",)  # verl's name of an agent that answers once
_NESTED: Final = "extra_info"


def describe_session_fields(config: InferenceConfig, examples: Sequence[Example]) -> Iterator[str]:
    """Yield a sentence for each column, or entry of verl's ``extra_info``, that only a session could read."""
    if config.environment.name or config.scores_answers or config.engine.replayed_run:
        return
    for name, count in Counter(name for example in examples for name in _list_fields(example.row)).items():
        yield (
            f"{write_count(count, 'row has', 'rows have')} a value in {name!r}, which sessions with tools or an "
            "environment read, and each prompt is answered once here: name a function of yours in environment.name "
            "(docs/environments.md), unless this is meant"
        )


def _list_fields(row: Mapping[str, Any]) -> Iterator[str]:
    nested = row.get(_NESTED)
    yield from (name for name, value in row.items() if _is_of_session(name, value))
    if isinstance(nested, Mapping):
        yield from (f"{_NESTED}.{name}" for name, value in nested.items() if _is_of_session(name, value))


def _is_of_session(name: object, value: object) -> bool:
    if not _is_name_of_session(name) or not isinstance(value, str | bool | list | Mapping):
        return False
    return bool(value) and value not in _ONCE


@lru_cache(maxsize=1024)  # every row has the same names
def _is_name_of_session(name: object) -> bool:
    return isinstance(name, str) and _FIELD.fullmatch(name) is not None
