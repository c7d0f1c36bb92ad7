"""Records that pass between the runtime and a backend: places, processes, requests, replies, deaths."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from podium.runtime.exception_pickling import unpack_exception

__all__ = ["Capabilities", "Death", "Failure", "Node", "OnDeath", "Packed", "Place", "ProcessSpec", "Reply", "Request"]
__all__ += ["Resources"]

Resources = Mapping[str, float]
"""Amounts by name: "cpu", "gpu" (accelerators of any make), "memory" (bytes), and a node's custom resources."""

Packed = Any
"""A value in the form in which the backend carries it. It may be sent to many processes."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can do. Tests and the runtime look at this, and never at a backend's name."""

    processes: bool  # workers run in processes of their own: these can be killed, restarted and given an environment
    collectives: bool  # torch.distributed works over several ranks
    concurrent: bool  # calls can be in flight while the controller goes on
    exit_status: bool = True  # a death's cause is the exit code or the signal
    detached: bool = False  # a group can outlive its controller and be found by name
    this_machine: bool = False  # all workers run on the controller's machine, so that its addresses reach them


@dataclass(frozen=True)
class Node:
    """One machine."""

    name: str
    resources: Resources  # all that the node has, reserved or not
    taken: Mapping[str, Resources] = field(default_factory=dict[str, Any])  # what other controllers hold, by holder
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    devices: tuple[int, ...] | None = None  # indices of its accelerators on the machine; by default all from 0 on
    kinds: tuple[str, ...] = ()  # the model of each of them, such as "NVIDIA H100 80GB HBM3"; "" or none if unknown


@dataclass(frozen=True)
class Place:
    """Room for one worker process on a node; ``devices`` are some of the node's."""

    node: str
    resources: Resources
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One worker process to start. The backend makes ``place.devices``, and no others, visible before the worker's code
    is imported."""

    label: str  # name of the process in logs
    rank: int
    place: Place
    token: Any  # the token of ``Backend.reserve`` for the reservation whose place number ``slot`` this is
    slot: int
    threads: int  # number of threads for computing
    env: Mapping[str, str] = field(default_factory=dict[str, Any])  # set before anything is imported
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # from ``cluster.start(options=...)``
    timeout_s: float = 600.0  # within which the process takes requests, or its start has failed
    detached: str = ""  # name of the group if the process outlives this controller


class Death(NamedTuple):
    """How a worker process ended: "signal SIGKILL" or "exit code 3", and the last lines of its stderr."""

    cause: str
    last_words: tuple[str, ...] = ()


OnDeath = Callable[[int, Death], None]
"""A function that is called with the rank of a worker process and how it ended."""


@dataclass(slots=True)
class Request:
    """One call for one worker process, to be run by ``WorkerProcess.execute(number, target, method, arguments)``.

    A concurrent request runs at once, beside others, by ``WorkerProcess.execute_concurrently``. Other requests run one
    at a time in the order sent. The same request may go to many processes.
    """

    number: int  # by which the request can be cancelled
    target: str  # name of the worker; "" for a method of the worker process itself
    method: str
    shared: Packed  # arguments that many processes receive
    own: Packed | None = None  # further arguments for this process; the two are merged
    wants_result: bool = True  # or only the end of the call
    concurrent: bool = False
    wire: Any = None  # for the backend to use


class Reply(NamedTuple):
    """The answer to a request. The payload is the packed result, or the packed Failure if the status is "error".

    Times are CLOCK_MONOTONIC nanoseconds of the worker process's machine.
    """

    status: Literal["ok", "error", "cancelled"]
    payload: Packed
    started_ns: int = 0
    ended_ns: int = 0


@dataclass(frozen=True)
class Failure:
    """An exception that leaves a worker process, as the payload of a reply with status "error".

    Attributes:
        exception: The exception, or its bytes where it leaves the process, or None where it cannot be made anew.
        secondary: The exception looks like the consequence of another rank's failure: a broken collective.
    """

    type_name: str
    message: str
    traceback: str
    exception: BaseException | bytes | None
    secondary: bool

    def original(self) -> BaseException | None:
        """The exception, or None where it does not survive the way."""
        return unpack_exception(self.exception) if isinstance(self.exception, bytes) else self.exception
