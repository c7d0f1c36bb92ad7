"""The contract between the runtime and a backend. Everything else is written once, above it.

A backend lists nodes, reserves slots on them, starts one worker process a slot, and carries requests to the processes.
Each of them runs :class:`podium.runtime.worker_process.WorkerProcess`. A backend is found by name through the
entry-point group ``podium.backends``, and its class is called with the options of ``podium.connect(name, **options)``.

Any thread may call any method here. A backend may call ``done`` and ``on_death`` from any thread. They return quickly
and never raise.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from podium.errors import ConfigError
from podium.runtime.messages import Capabilities, Node, OnDeath, Packed, Place, ProcessSpec, Reply, Request

if TYPE_CHECKING:
    from podium.data import TensorStore

__all__ = ["CONTRACT_VERSION", "Backend", "ProcessHandle"]

CONTRACT_VERSION = 1
"""Version of this contract. It changes when a backend that kept the contract has to change."""


class ProcessHandle(ABC):
    """A running worker process. ``pid`` is 0 where it shares the controller's process."""

    pid: int = 0

    @abstractmethod
    def invoke(self, request: Request, done: Callable[[Reply], None]) -> None:
        """Send ``request`` without waiting for the answer. ``done`` is called once, or never if the process ends first,
        which ``on_death`` reports."""

    @abstractmethod
    def kill(self) -> None:
        """End the process and its children by force. Returns when ``on_death`` has reported the end. Idempotent.

        Where there is time, the runtime has sent the request ``("", "shutdown")`` before, which closes the workers. The
        process may end by itself after its answer to that request.
        """

    def stopped(self) -> bool:
        """Whether the process does not run because a signal such as SIGSTOP has stopped it. False where that is not
        known."""
        return False


class Backend(ABC):
    """A place where worker processes run. ``capabilities`` is an attribute of the class, unless options change it.

    A worker process starts in the directory in which the controller is then, and imports from its ``sys.path``. When
    the controller ends, in whatever way, its worker processes and their children end within seconds. Worker processes
    ignore the terminal's Ctrl-C, which is for the controller. What they print appears where the controller's output
    goes, unless the backend's option ``log_dir`` names another directory.
    """

    capabilities: Capabilities

    @classmethod
    def expected_nodes(cls, options: Mapping[str, Any]) -> Sequence[Node]:
        """The nodes that a backend with these options would have, found without starting it; empty if unknown."""
        return ()

    @classmethod
    def stand_in(cls) -> tuple[str, str] | None:
        """Return the name of the backend that takes this one's place, and the reason, if this one cannot run on this
        system. By default None: this backend can run.
        """
        return None

    @classmethod  # noqa: B027 - most backends have nothing to prepare
    def prepare(cls, preload: Sequence[str]) -> None:
        """Begin to prepare, without waiting, for a backend of this class with this option ``preload``.

        It may be called several times, or not at all. Preparations that no backend takes over end with this process.
        """

    @abstractmethod
    def nodes(self) -> Sequence[Node]:
        """All nodes as they are now, in a stable order."""

    def reserve(self, places: Sequence[Place], detached: bool) -> tuple[Any, Sequence[Place]]:
        """Hold ``places``, which are free. A ``detached`` reservation outlives this controller. Returns a token, which
        pickles, and the places, with other ``devices`` where the cluster hands these out. Raises PlacementError, and
        holds nothing, if the places cannot be had within seconds."""
        return None, places

    def release(self, token: Any) -> None:  # noqa: B027 - nothing is held by default
        """Release a reservation."""

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ConfigError for ``options`` of ``cluster.start`` that worker processes do not have. By default they
        have none."""
        for name in options:
            raise ConfigError(f"start(options={{{name!r}: ...}}): this backend has no options for a worker process")

    @abstractmethod
    def start_processes(self, specs: Sequence[ProcessSpec], on_death: OnDeath) -> Sequence[ProcessHandle]:
        """Start one worker process for each spec, or none. A process has started when it takes requests, which make its
        workers. ``on_death`` reports the end of each process that has started, wanted or not, after all replies that
        the process sent before. Raises WorkerStartError, also where a process needs longer than ``timeout_s`` of its
        spec."""

    def attach(self, name: str, on_death: OnDeath) -> Sequence[ProcessHandle]:
        """The processes of the detached group ``name`` of another controller, in rank order; empty without one."""
        return ()

    def let_go(self, processes: Sequence[ProcessHandle]) -> None:  # noqa: B027 - only where there are detached processes
        """Forget processes, which run on without this controller."""

    @abstractmethod
    def rendezvous(self, processes: Sequence[ProcessHandle]) -> str:
        """A new ``init_method`` for torch.distributed that these processes can reach; "" without collectives."""

    @abstractmethod
    def pack(self, value: Any, readers: int) -> Packed:
        """Make ``value`` ready to be sent to ``readers`` processes, stored once. Raises SerializationError.

        What a worker is made of is sent again when its group restarts, so it has to stay as it is until it is let go.
        """

    @abstractmethod
    def unpack(self, payload: Packed) -> Any:
        """The value of a reply's payload, for the caller to keep. Called at most once. Raises SerializationError."""

    def store(self) -> "TensorStore":
        """The store in the controller's process, for ``Cluster.put``, which asks for it once. The blocks of the default
        one travel with each message that refers to them."""
        from podium.data import MemoryStore  # numpy with it, which a script may do without

        return MemoryStore()

    def wait(self, ended: Callable[[], bool], timeout_s: float | None) -> bool | None:
        """Deliver replies in the calling thread until ``ended()`` or ``timeout_s``, and return True. Returns False at
        once if another thread does that, and None, as by default, where replies come in by themselves."""
        return None

    def wake(self) -> None:  # noqa: B027 - nothing to wake by default
        """Have every thread in :meth:`wait` call ``ended()`` again."""

    @abstractmethod
    def close(self) -> None:
        """End all processes that are not detached and free everything. Idempotent."""
