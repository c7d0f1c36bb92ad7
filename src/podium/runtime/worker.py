"""The base class of workers: ordinary classes whose endpoints a controller can call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

from podium.errors import ConfigError
from podium.runtime.context import WorkerContext, current_context

if TYPE_CHECKING:
    from podium.runtime.group import WorkerGroup

__all__ = ["Bound", "Startable", "Worker"]

P = ParamSpec("P")
W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)


class Startable(Generic[W_co]):
    """An argument of ``cluster.start``, which returns a handle that is typed as ``W_co``."""


@dataclass(frozen=True)
class Bound(Startable[W_co]):
    """A worker class with its constructor's arguments, for ``cluster.start``. Made by :meth:`Worker.bind`."""

    cls: type[W_co]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def build(self) -> W_co:
        """Make the worker here."""
        return self.cls(*self.args, **self.kwargs)


class Worker:
    """Subclass it, mark methods with :func:`~podium.runtime.endpoint`, and start it on a pool.

    A worker knows no backend and reads no environment variables. ``self.ctx`` is there before ``__init__`` runs, and
    ``super().__init__()`` need not be called. A worker that is made by hand, in a test or inside another worker, is an
    ordinary object, and its endpoints are ordinary methods. Its place is that of the worker that made it, or that of a
    single rank.

    A worker may define ``close(self)``, which is called when its group is closed, and not when its process is killed.
    """

    ctx: WorkerContext

    if not TYPE_CHECKING:  # a type checker takes the constructor's signature from __init__

        def __new__(cls, *args: Any, **kwargs: Any) -> Worker:
            worker = super().__new__(cls)
            worker.ctx = current_context.get() or WorkerContext()
            return worker

    @classmethod
    def bind(cls: Callable[P, W], *args: P.args, **kwargs: P.kwargs) -> Bound[W]:  # pyright: ignore[reportGeneralTypeIssues]
        """The class with its constructor's arguments, which are checked against its signature at once.

        Raises:
            ConfigError: The arguments do not fit the constructor.
        """
        worker = cast("type[W]", cls)
        plain = worker.__init__ is object.__init__
        signature = inspect.Signature() if plain else inspect.signature(worker)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{worker.__name__}.bind(): {error}; {worker.__name__} takes {signature}") from None
        return Bound(worker, args, dict(kwargs))

    @property
    def group(self) -> WorkerGroup:
        """On the controller's handle: the group (restart, close, run, world_size). A worker itself has none."""
        raise AttributeError(
            f"{type(self).__name__}.group exists on the controller's handle, which cluster.start() returns; "
            "inside a worker use self.ctx"
        )
