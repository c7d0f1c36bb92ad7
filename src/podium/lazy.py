"""Imports that take little time: public names of packages on first use, and heavy modules without the collector."""

import ast
import gc
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package.

    Its public names are those that its source imports under ``if TYPE_CHECKING``, where type checkers and editors see
    them:

        if TYPE_CHECKING:
            from podium.workers.critic import Critic as Critic
        else:
            __getattr__, __dir__, __all__ = lazy_exports(__name__)

    Args:
        package: Name of the package. It calls this function while it is imported.
    """
    module = sys.modules[package]
    loader: Any = module.__spec__ and module.__spec__.loader
    homes: dict[str, str] = {}
    for statement in ast.parse(loader.get_source(package)).body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            for line in statement.body:
                if isinstance(line, ast.ImportFrom) and line.module is not None:
                    homes.update((alias.name, line.module) for alias in line.names)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with keep_interrupts():
            value = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *homes}), list(homes)


@contextmanager
def without_collector() -> Iterator[None]:
    """Leave the garbage collector out during the block, and have it ignore for good what there is at the end.

    Importing torch and transformers makes half a million objects that stay. To look for garbage among them, again and
    again, takes a fifth of the time of the imports, and at the end of the process most of its time to exit.
    """
    with keep_interrupts():
        if not gc.isenabled():
            yield
            return
        gc.disable()
        try:
            yield
        finally:
            gc.freeze()
            gc.enable()


@contextmanager
def keep_interrupts() -> Iterator[None]:
    """Raise after the block what the handler of Ctrl-C raised in it, which is KeyboardInterrupt but for a user's
    handler. Libraries that are imported may swallow that exception, or raise another one in its place."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    raised: list[BaseException] = []

    def note(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception:
        if not raised:
            raise
    finally:
        if signal.getsignal(signal.SIGINT) == note:
            signal.signal(signal.SIGINT, handler)
    if raised:
        raise raised[0]
