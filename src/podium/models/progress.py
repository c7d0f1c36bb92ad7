"""How far a worker is with the tensors of its model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from transformers.utils import logging as transformers_logging

from podium.runtime.worker import WorkerContext, current_context
from podium.telemetry.progress import Counting

T = TypeVar("T")

_BAR: Final = "Loading weights"  # transformers' name of the progress bar over the tensors that it reads


def count_progress(tensors: Collection[T]) -> Iterator[T]:
    """Yield each of ``tensors``, and count each once it was used."""
    context = current_context.get() or WorkerContext()
    with Counting("tensors", len(tensors), role=context.role, rank=context.rank) as count:
        yield from count.over(tensors)


@contextmanager
def counting_transformers() -> Iterator[None]:
    """Count each tensor that transformers reads during the block, in the place of its progress bar."""
    set_hook: Any = getattr(transformers_logging, "set_tqdm_hook", None)
    if set_hook is None:  # an older transformers
        yield
        return
    before = set_hook(_bar)
    try:
        yield
    finally:
        set_hook(before)


def _bar(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("desc") == _BAR and args and isinstance(args[0], Collection):
        return count_progress(args[0])  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return make(*args, **kwargs)
