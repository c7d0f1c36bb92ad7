"""The base class of workers: ordinary classes whose endpoints a controller can call."""

from __future__ import annotations

import inspect
import operator
import socket
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

from podium.annotations import signature_of
from podium.errors import ConfigError
from podium.runtime.dispatch import Mesh
from podium.runtime.endpoints import endpoints_of

if TYPE_CHECKING:
    from podium.runtime.group import Handle, WorkerGroup

P = ParamSpec("P")
W = TypeVar("W")
H_co = TypeVar("H_co", covariant=True)


class Declared(dict[str, tuple[dict[str, int], dict[str, int]]]):
    """By mesh, the coordinates that a worker has declared, and the output. ``closed``: its constructor has ended."""

    closed = False


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """The facts about a worker, fixed for its life.

    Attributes:
        rank: Number of this process among the processes of the group.
        world_size: Number of processes.
        local_rank: Number of this process among those on the same node.
        local_world_size: Number of processes.
        node: Name of the node.
        address: Address at which the group's other processes reach this one.
        devices: Indices of the accelerators that this worker owns, valid in its own process; empty on a CPU.
        role: Name under which the worker was started.
        seed: Seed of this rank, from 0 to 2**32 - 1. It follows from ``cluster.start(seed=...)`` and the rank.
        threads: Number of threads for computing, this worker's share of the node's cores.
        rendezvous: URL by which the processes of the group find each other (torch.distributed's ``init_method``); ""
            where the backend has no collectives.
        meshes: Meshes by name. "default" always exists; it is ``Mesh(dp=world_size)`` unless given.
        colocated: The other workers in the same worker process, by name, as plain objects.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: str = "localhost"
    address: str = "127.0.0.1"
    devices: tuple[int, ...] = ()
    role: str = ""
    seed: int = 0
    threads: int = 1
    rendezvous: str = ""
    meshes: Mapping[str, Mesh] = field(default_factory=lambda: MappingProxyType({"default": Mesh(dp=1)}))
    colocated: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType[str, Any]({}))

    declared: Declared = field(default_factory=lambda: Declared(), repr=False, compare=False)  # see declare_mesh

    def declare_mesh(self, name: str, *, output: Mapping[str, int] | None = None, **coordinates: int) -> None:
        """Say in the constructor where this rank stands in the mesh ``name``, as a framework has placed it there.

        ``shard(name)`` then splits over this mesh. ``output`` is that of :class:`~podium.runtime.Mesh`, the same on all
        ranks. The group has the mesh in ``group.meshes`` when all ranks have been made. Declaring "default" replaces
        the mesh by which endpoints shard that name none.

        >>> WorkerContext(rank=3).declare_mesh("megatron", tp=1, cp=0, dp=1, pp=0, output={"pp": -1})

        Raises:
            ConfigError: There are no coordinates, or one is no whole number.
        """
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"declare_mesh({name!r}): the first argument is the mesh's name, as in shard(name)")
        if not coordinates:
            raise ConfigError(f"declare_mesh({name!r}): no coordinates; give those of this rank, as in dp=0, tp=1")
        if not isinstance(output or {}, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"declare_mesh({name!r}, output={output!r}): expected an axis and its coordinate")
        try:
            declared = {axis: operator.index(at) for axis, at in coordinates.items()}, dict(output or {})
        except TypeError:
            raise ConfigError(f"declare_mesh({name!r}): coordinates are whole numbers; got {coordinates}") from None
        if self.declared.closed:
            raise ConfigError(f"declare_mesh({name!r}): the mesh of a group is fixed; declare it in the constructor")
        if (former := self.declared.setdefault(name, declared)) != declared:
            raise ConfigError(f"declare_mesh({name!r}): this rank has declared {former} before, and now {declared}")

    def free_port(self) -> int:
        """A port of ``address`` where nobody listens now. Listen there soon: it is not reserved."""
        with socket.create_server((self.address, 0)) as server:
            return server.getsockname()[1]


current_context: ContextVar[WorkerContext | None] = ContextVar("podium_worker_context", default=None)
"""The place of the worker that is made or runs a call in this thread. Workers that it makes get the same place."""


@dataclass(frozen=True)
class Bound(Generic[H_co]):
    """A worker class with its constructor's arguments, for ``cluster.start``, which returns what ``Bound`` is generic
    over: ``Bound[Handle[Scorer]]`` is started as a ``Handle[Scorer]``. Made by :meth:`Worker.bind`."""

    cls: type[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Group:
    """The attribute ``group`` of a worker class. A type checker finds it on a handle, and not on a worker."""

    def __get__(self, instance: None, owner: type[W]) -> WorkerGroup[W]:
        raise AttributeError(
            f"{owner.__name__}.group exists on the controller's handle, which cluster.start() returns; inside a worker "
            "use self.ctx"
        )


class Worker:
    """Subclass it, mark methods with :func:`~podium.runtime.endpoint`, and start it on a pool.

    A worker knows no backend and reads no environment variables. ``self.ctx`` is there before ``__init__`` runs, and
    ``super().__init__()`` need not be called. A worker that is made by hand, in a test or inside another worker, is an
    ordinary object, and its endpoints are ordinary methods. Its place is that of the worker that made it, or that of a
    single rank.

    A worker may define ``close(self)``, which is called when its group is closed, and not when its process is killed.
    """

    if TYPE_CHECKING:  # a type checker takes the constructor's signature from __init__

        def _declare(self) -> None:
            self.ctx: WorkerContext  # declared here, it is an attribute of workers, and not of the class as a handle

    else:

        def __new__(cls, /, *args: Any, **kwargs: Any) -> Worker:
            worker = super().__new__(cls)
            object.__setattr__(worker, "ctx", current_context.get() or WorkerContext())  # the class may be frozen
            return worker

    @classmethod
    def bind(cls: Callable[P, W], /, *args: P.args, **kwargs: P.kwargs) -> Bound[Handle[W]]:  # pyright: ignore[reportGeneralTypeIssues]
        """The class with its constructor's arguments, which are checked against its signature at once.

        Raises:
            ConfigError: The arguments do not fit the constructor.
        """
        worker = cast("type[W]", cls)
        plain = worker.__init__ is object.__init__
        signature = inspect.Signature() if plain else signature_of(worker)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{worker.__name__}.bind(): {error}; {worker.__name__} takes {signature}") from None
        return Bound(worker, args, dict(kwargs))

    group = _Group()
    """On the controller's handle: the group (restart, close, on, run, world_size). A worker itself has none."""


def check_made(worker: Any, cls: type[Any], context: WorkerContext) -> None:
    """Raise a ConfigError if an object is not this rank's worker, or hides an endpoint of its class."""
    if getattr(worker, "ctx", None) is not context:
        raise ConfigError(
            f"{cls.__name__}(...) is no worker of this rank: its constructor sets self.ctx, which the runtime has set, "
            "or its class returns an object that it has made before, where every rank needs one of its own"
        )
    attributes: dict[str, Any] = worker.__dict__
    for name in endpoints_of(cls):
        if name in attributes and not callable(attributes[name]):
            kind = type(attributes[name]).__name__
            what = f"{cls.__name__}: its constructor sets self.{name} to {kind}, which hides the endpoint {name}()"
            raise ConfigError(f"{what}; rename one of the two")
