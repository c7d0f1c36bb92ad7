"""Endpoints: the methods of a worker that a controller can call."""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial, partialmethod, update_wrapper
from numbers import Real
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, cast, overload

from podium.annotations import signature_of
from podium.errors import ConfigError
from podium.runtime.calls.call import Call
from podium.runtime.codec import Reading
from podium.runtime.collect import Collect, concat, first, gather, nothing, reduce
from podium.runtime.dispatch import Arguments, CheckedDispatch, Dispatch, broadcast, check_count, shard
from podium.spelling import write_count

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping
    from typing import Protocol, TypedDict, Unpack

    from numpy.typing import NDArray
    from torch import Tensor

    from podium.data import Rows
    from podium.runtime.group import WorkerGroup

    class _How(TypedDict, total=False):
        """The arguments of :func:`endpoint` that do not change what a call returns."""

        concurrent: bool
        returns: Returns | None
        receives: Literal["tensor", "ref"]
        readonly: bool


TAKEN = ("bind", "ctx", "group")
_NO_METHODS = (staticmethod, classmethod, property, cached_property, partialmethod, type)
NUMBERS = tuple(map(str, range(100)))
Returns = Literal["value", "ref"]
"""Whether the tensors of a result come to the controller, or stay with the worker that made them."""

P = ParamSpec("P")
Ret = TypeVar("Ret")
Out = TypeVar("Out")
Own = TypeVar("Own")
Table = TypeVar("Table", bound="Rows | Tensor | NDArray[Any] | list[Any] | Mapping[Any, Any]")


@dataclass(frozen=True)
class EndpointSpec:
    """The declaration of an endpoint: the method's name and parameters, and how its calls are split and joined."""

    name: str
    names: tuple[str, ...]  # the parameters without ``self``
    required: frozenset[str]
    open_ended: bool  # the method takes ``**kwargs``
    dispatch: Dispatch
    collect: Collect[Any, Any]
    concurrent: bool
    returns: Returns | None  # None where ``cluster.start(returns=...)`` decides
    reads: Reading
    function: Callable[..., Any]
    checked: bool = False  # the dispatch is a user's own
    shipped: bool = False  # a function that travels with each call, and no method of the class

    def arguments(self, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Name the arguments of one call.

        Raises:
            ConfigError: The arguments do not fit the method's signature. Raised before anything is sent.
        """
        if not (args or kwargs or self.required):
            return Arguments(label, {})
        values = dict(zip(self.names, args, strict=False))
        wrong = ""
        if len(args) > len(self.names):
            wrong = f"takes {write_count(len(self.names), 'positional argument')} and got {len(args)}"
        elif doubled := values.keys() & kwargs.keys():
            wrong = f"got {sorted(doubled)} twice"
        elif not self.open_ended and (unknown := kwargs.keys() - set(self.names)):
            wrong = f"has no parameter {sorted(unknown)}"
        values.update(kwargs)
        if missing := self.required - values.keys():
            wrong = wrong or f"misses {sorted(missing)}"
        if wrong:
            raise ConfigError(f"{label}() {wrong}; its parameters are ({', '.join(self.names)})")
        return Arguments(label, values)


class Window:
    """At most ``size`` unfinished calls."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._unfinished: deque[Call[Any]] = deque()
        self._lock = threading.RLock()  # a handler of a signal may call inside the wait

    def submit(self, send: Callable[[], Call[Any]]) -> Call[Any]:
        """Call ``send()`` as soon as there is room."""
        with self._lock:
            self._unfinished = deque(call for call in self._unfinished if not call.done())
            while len(self._unfinished) >= self._size:
                self._unfinished.popleft().wait()
            call = send()
            self._unfinished.append(call)
            return call


class Endpoint(Generic[P, Out]):
    """An endpoint on the controller's handle. A call waits for the result; :meth:`submit` does not wait."""

    def __init__(
        self, group: WorkerGroup[Any], spec: EndpointSpec, timeout_s: float | None = None, window: Window | None = None
    ) -> None:
        self._group = group
        self.spec = spec
        self._timeout_s = timeout_s
        self._window = window
        self.__name__, self.__doc__ = spec.name, spec.function.__doc__

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Out:
        """Call and wait. Raises what :meth:`Call.result() <podium.runtime.Call.result>` raises."""
        return self.submit(*args, **kwargs).result()

    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> Call[Out]:
        """Call without waiting. Calls of one group run in the order in which they were submitted."""
        if self._window is None:
            return self._group.submit(self.spec, args, kwargs, self._timeout_s)
        return self._window.submit(lambda: self._group.submit(self.spec, args, kwargs, self._timeout_s))

    def within(self, timeout_s: float) -> Endpoint[P, Out]:
        """Return the same endpoint with another deadline, in seconds from submission, above 0. Raises ConfigError."""
        if not isinstance(timeout_s, Real) or not timeout_s > 0:
            raise ConfigError(f"within(timeout_s={timeout_s!r}): a deadline is a positive number of seconds")
        return Endpoint(self._group, self.spec, timeout_s, self._window)

    def at_most(self, calls: int) -> Endpoint[P, Out]:
        """The same endpoint with at most ``calls`` unfinished calls. The next ``submit`` waits for the oldest one.

        At the end of a chain of calls, this limits the whole chain and the memory that it takes. A limit below 1 raises
        ConfigError.

        >>> train = trainers.update.at_most(4)  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     train.submit(scorers.score.submit(batch).arg())
        """
        window = Window(check_count(calls, f"at_most({calls!r})"))
        return Endpoint(self._group, self.spec, self._timeout_s, window)

    def pad(self, on: bool = True) -> Endpoint[P, Out]:
        """The same endpoint, whose rows are repeated for this call so that all ranks get as many, or are not.

        Results are joined as those of ``shard(pad=...)``: ``concat`` takes the repeated rows off again.

        Raises:
            ConfigError: The endpoint does not shard.
        """
        try:
            dispatch = self.spec.dispatch.with_pad(on)
        except ConfigError as error:
            raise ConfigError(f"{self._group.name}.{self.spec.name}.pad({on}): {error}") from None
        return Endpoint(self._group, replace(self.spec, dispatch=dispatch), self._timeout_s, self._window)

    @property
    def __signature__(self) -> inspect.Signature:
        try:
            signature = signature_of(self.spec.function)
        except ValueError:  # a function of C
            return inspect.Signature()
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __repr__(self) -> str:
        return f"<endpoint {self._group}.{self.spec.name}{self.__signature__}>"


class EndpointMethod(Generic[P, Own, Out]):
    """A marked method in its class. On a worker it is the plain method, and on a handle an :class:`Endpoint`.

    A type checker reads a handle as the class (see :data:`~podium.runtime.Handle`), so it finds the endpoint there.
    """

    def __init__(self, function: Callable[..., Any], spec: EndpointSpec) -> None:
        update_wrapper(cast(Any, self), function)
        self.function = function
        self.spec = spec

    def __call__(self, worker: Any, /, *args: P.args, **kwargs: P.kwargs) -> Own:
        """The plain method, as ``Scorer.score(worker, batch)``."""
        return self.function(worker, *args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> Endpoint[P, Out]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[P, Own]: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        return self if instance is None else MethodType(self.function, instance)


if TYPE_CHECKING:
    Method = Callable[Concatenate[Any, P], Ret]
    Later = Coroutine[Any, Any, Ret]

    class Unknown:
        """Only Any is assignable to this class. The overloads that take it are those of methods that return Any, which
        would fit those of async methods too."""

    # The decorators that endpoint(collect=...) returns. Their overloads tell the results of async methods from others.

    class Gathers(Protocol):
        @overload
        def __call__(self, method: Method[P, Unknown], /) -> EndpointMethod[P, Any, list[Any]]: ...
        @overload
        def __call__(self, method: Method[P, Later[Ret]], /) -> EndpointMethod[P, Later[Ret], list[Ret]]: ...
        @overload
        def __call__(self, method: Method[P, Ret], /) -> EndpointMethod[P, Ret, list[Ret]]: ...

    class Joins(Protocol):
        @overload
        def __call__(self, method: Method[P, Unknown], /) -> EndpointMethod[P, Any, Any]: ...
        @overload
        def __call__(self, method: Method[P, Later[Table]], /) -> EndpointMethod[P, Later[Table], Table]: ...
        @overload
        def __call__(self, method: Method[P, Table], /) -> EndpointMethod[P, Table, Table]: ...

    class Reduces(Protocol):
        @overload
        def __call__(self, method: Method[P, Unknown], /) -> EndpointMethod[P, Any, Any]: ...
        @overload
        def __call__(self, method: Method[P, Later[Ret]], /) -> EndpointMethod[P, Later[Ret], Ret]: ...
        @overload
        def __call__(self, method: Method[P, Ret], /) -> EndpointMethod[P, Ret, Ret]: ...

    class Drops(Protocol):
        def __call__(self, method: Method[P, Ret], /) -> EndpointMethod[P, Ret, None]: ...

    class Collects(Protocol[Ret, Out]):  # pyright: ignore[reportInvalidTypeVarUse]
        @overload
        def __call__(self, method: Method[P, Unknown], /) -> EndpointMethod[P, Any, Out]: ...
        @overload
        def __call__(self, method: Method[P, Later[Ret]], /) -> EndpointMethod[P, Later[Ret], Out]: ...
        @overload
        def __call__(self, method: Method[P, Ret], /) -> EndpointMethod[P, Ret, Out]: ...


@overload
def endpoint(method: Method[P, Unknown], /) -> EndpointMethod[P, Any, list[Any]]: ...
@overload
def endpoint(method: Method[P, Later[Ret]], /) -> EndpointMethod[P, Later[Ret], list[Ret]]: ...
@overload
def endpoint(method: Method[P, Ret], /) -> EndpointMethod[P, Ret, list[Ret]]: ...
@overload
def endpoint(*, dispatch: Dispatch = ..., collect: gather = ..., **how: Unpack[_How]) -> Gathers: ...
@overload
def endpoint(*, dispatch: Dispatch = ..., collect: concat, **how: Unpack[_How]) -> Joins: ...
@overload
def endpoint(*, dispatch: Dispatch = ..., collect: first | reduce, **how: Unpack[_How]) -> Reduces: ...
@overload
def endpoint(*, dispatch: Dispatch = ..., collect: nothing, **how: Unpack[_How]) -> Drops: ...
@overload
def endpoint(*, dispatch: Dispatch = ..., collect: Collect[Ret, Out], **how: Unpack[_How]) -> Collects[Ret, Out]: ...
def endpoint(
    function: Callable[..., Any] | None = None,
    /,
    *,
    dispatch: Dispatch | None = None,
    collect: Collect[Any, Any] | None = None,
    concurrent: bool = False,
    returns: Returns | None = None,
    receives: Literal["tensor", "ref"] = "tensor",
    readonly: bool = False,
) -> Any:
    """Mark a worker's method, sync or async, as callable from the controller.

    Args:
        dispatch: How arguments reach the ranks. Default: ``broadcast()``.
        collect: How the ranks' results become one. Default: ``gather()``.
        concurrent: The endpoint may run while another call runs in the same worker process, in a thread of its own, or
            in the event loop if it is async. Other calls run one at a time, in the order submitted.
        returns: "ref" leaves the tensors of the result where they were made. The controller receives the same value
            with a :class:`podium.TensorRef` in the place of each. Default: ``cluster.start(returns=...)``.
        receives: "ref" passes references to the method as they are. By default the method receives tensors.
        readonly: Whether the method leaves tensors that it receives by reference unchanged, so that no store copies
            them.

    Raises:
        ConfigError: The method has positional-only parameters or ``*args``, or an argument here is of a wrong kind.
    """
    if dispatch is not None and not isinstance(dispatch, Dispatch):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"endpoint(dispatch={dispatch!r}): expected an object such as shard() or broadcast()")
    if collect is not None and not isinstance(collect, Collect):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"endpoint(collect={collect!r}): expected an object such as concat() or gather()")
    if returns not in (None, "value", "ref") or receives not in ("tensor", "ref"):
        raise ConfigError(
            f"endpoint(returns={returns!r}, receives={receives!r}): returns is 'value' or 'ref', receives is 'tensor' "
            "or 'ref'"
        )
    if readonly and receives == "ref":
        raise ConfigError(
            "endpoint(receives='ref', readonly=True): nobody can write to a reference; leave out one of the two"
        )
    declare = partial(
        _declare,
        dispatch=dispatch or broadcast(),
        collect=collect or gather(),
        concurrent=concurrent,
        returns=returns,
        reads="readonly" if readonly else receives,
    )
    return declare if function is None else declare(function)


def _declare(function: Callable[..., Any], dispatch: Dispatch, **how: Any) -> EndpointMethod[Any, Any, Any]:
    name, kind = getattr(function, "__name__", ""), type(function).__name__
    called = f"endpoint {getattr(function, '__qualname__', name or kind)}"
    if isinstance(function, _NO_METHODS) or not callable(function):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"{called} is a {kind}; an endpoint is a plain method, def {name or 'name'}(self, ...)")
    if name in TAKEN:
        raise ConfigError(f"{called}: every worker has a {name!r} already; rename it")
    if name.startswith("__") and name.endswith("__"):
        raise ConfigError(f"{called}: a handle has no special methods, so no script could call it; rename it")
    return EndpointMethod(function, _spec(function, called, dispatch, **how))


def _spec(function: Callable[..., Any], called: str, dispatch: Dispatch, **how: Any) -> EndpointSpec:
    parameters = list(signature_of(function).parameters.values())[1:]
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ConfigError(
                f"{called}: parameter {parameter} has no name to send it under; endpoints take named parameters and "
                "may take **kwargs"
            )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{called} is a generator, which cannot leave its process; return a list of what it yields")
    named = {parameter.name: parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    sharded = (dispatch.args or ()) if isinstance(dispatch, shard) else ()
    if unknown := [name for name in sharded if name not in named]:
        raise ConfigError(f"{called}: shard(args=...) names {unknown}, but its parameters are {[*named]}")
    checked = type(dispatch).__module__ != shard.__module__
    return EndpointSpec(
        name=getattr(function, "__name__", called),
        names=tuple(named),
        required=frozenset(name for name, parameter in named.items() if parameter.default is parameter.empty),
        open_ended=len(named) < len(parameters),
        dispatch=CheckedDispatch(dispatch) if checked else dispatch,
        checked=checked,
        function=function,
        **how,
    )


def spec_of_function(function: Callable[..., Any], dispatch: Dispatch, collect: Collect[Any, Any]) -> EndpointSpec:
    """The declaration of a function that travels with its calls. Where a parameter has no name to send it under,
    positional arguments are sent under their numbers."""
    name = getattr(function, "__name__", type(function).__name__)
    how: dict[str, Any] = {"dispatch": dispatch, "collect": collect, "concurrent": False, "returns": None}
    how |= {"reads": "tensor", "shipped": True}
    try:
        parameters = list(signature_of(function).parameters.values())[1:]
    except (ValueError, TypeError):  # a function of C
        parameters = None
    if parameters is None or any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters):
        return EndpointSpec(name=name, names=NUMBERS, required=frozenset(), open_ended=True, function=function, **how)
    return _spec(function, name, **how)


def endpoints_of(cls: type) -> dict[str, EndpointSpec]:
    """The endpoints of a worker class by name, inherited ones included. The name is that of the attribute in the class,
    by which the worker finds it, whatever the function is called."""
    specs: dict[str, EndpointSpec] = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            if isinstance(member, EndpointMethod):
                spec = cast("EndpointMethod[Any, Any, Any]", member).spec
                specs[name] = spec if spec.name == name else replace(spec, name=name)
            else:
                specs.pop(name, None)
    return specs
