"""Several workers in the same worker processes."""

from __future__ import annotations

from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints, overload

from podium.annotations import list_annotated_names
from podium.errors import ConfigError
from podium.runtime.group import WorkerHandle
from podium.runtime.worker import Bound


class Colocated(dict[str, Any]):
    """Handles of several workers that share the same worker processes: ``both.policy`` or ``both["policy"]``.

    A subclass that declares the workers gives them their types:

    >>> class Pair(Colocated):
    ...     policy: Handle[Policy]
    ...     critic: Handle[Critic]
    >>> both = cluster.start(colocate(Pair, policy=Policy.bind(), critic=Critic.bind()))  # doctest: +SKIP
    """

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"no worker {name!r} here; there are {sorted(self)}")
        return self[name]


C = TypeVar("C", bound=Colocated)


@overload
def colocate(**workers: Bound[Any]) -> Bound[Colocated]: ...
@overload
def colocate(kind: type[C], /, **workers: Bound[Any]) -> Bound[C]: ...
def colocate(kind: type[Colocated] = Colocated, /, **workers: Bound[Any]) -> Bound[Any]:
    """Several named workers for the same worker processes. ``self.ctx.colocated["name"]`` is the plain object of a
    worker.

    They are made in the order given, so a later one may use an earlier one in its constructor.

    Args:
        kind: A subclass of :class:`Colocated` that declares the workers, for a type checker.

    Raises:
        ConfigError: No worker is given, a worker has the name of a method of :class:`Colocated`, or ``kind`` declares
            other workers or handles of other classes.
    """
    if not workers:
        raise ConfigError(
            "colocate() needs at least one worker, as in colocate(actor=Actor.bind(), critic=Critic.bind())"
        )
    if taken := sorted(name for name in workers if hasattr(Colocated, name)):
        raise ConfigError(f"colocate(): a worker cannot be named {taken[0]!r}: the mapping of handles has that method")
    declared = {name for base in kind.__mro__ for name in list_annotated_names(base)}
    if kind is not Colocated and declared != workers.keys():
        raise ConfigError(
            f"colocate({kind.__name__}, ...): it declares {sorted(declared)}; given are {sorted(workers)}"
        )
    for name, cls in _read_declared_classes(kind).items():
        bound = workers[name]
        if isinstance(bound, Bound) and not issubclass(bound.cls, cls):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"colocate({kind.__name__}, ...): it declares {name} as Handle[{cls.__name__}]; given is "
                f"{bound.cls.__name__}.bind(...)"
            )
    return Bound(kind, (), workers)


def _read_declared_classes(kind: type[Colocated]) -> dict[str, type]:
    """The classes of the handles that ``kind`` declares, by name, as far as its annotations can be read."""
    try:
        hints = get_type_hints(kind)
    except NameError:  # an annotation is a text that names a class of a function
        return {}
    classes = {name: get_args(hint)[0] for name, hint in hints.items() if get_origin(hint) is WorkerHandle}
    return {name: cls for name, cls in classes.items() if isinstance(cls, type)}


def is_colocated(worker: object) -> bool:
    """Whether ``worker`` is what :func:`colocate` returns."""
    return isinstance(worker, Bound) and issubclass(cast("Bound[Any]", worker).cls, Colocated)
