"""Services over HTTP, which installed packages bring through the entry point group ``podium.services``. Podium itself
speaks no HTTP: a run whose sessions and generators are in the same processes needs no such package.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from podium.errors import ConfigError
from podium.extras import explain_packages
from podium.functions import explain_raised, find_installed
from podium_agents.service.keys import SessionKeys
from podium_agents.service.token_source import TokenSource

if TYPE_CHECKING:
    from podium.rollout.engines import Engine
    from podium.rollout.engines.requests import SessionRoom
    from podium.rollout.sampling import SamplingParams
    from podium.rollout.tasks.config import DataConfig
    from podium_agents.environments.client import Client
    from podium_agents.environments.contract import Task
    from podium_agents.environments.runner import Ending
    from podium_agents.service.service import Service

__all__ = ["Gateway", "HttpService", "OfferedSessions", "RemoteSource", "Server", "load_service", "open_gateway"]

_GROUP: Final = "podium.services"
_NAME: Final = "http"
_LOOPBACK: Final = "127.0.0.1"


class OfferedSessions(Protocol):
    """The sessions of a rollout worker that a service elsewhere lives."""

    def plan(
        self, names: Sequence[str], groups: Sequence[int], rows: Sequence[Task], *, is_evaluation: bool = False
    ) -> None:
        """Announce sessions, in the order in which the worker has room for them.

        Args:
            names: S names.
            groups: S numbers of their groups.
            rows: S rows of the data.
            is_evaluation: Whether they are not for training. Their rows are their tasks then.
        """
        ...

    async def live(self, client: Client) -> Ending:
        """Offer a session that is planned, and return how it ended."""
        ...


class Gateway(Protocol):
    """The address of the model for agents, with a key for each session. Close it at the end.

    Attributes:
        keys: The keys of sessions.
    """

    keys: SessionKeys

    def open(self, service: Service, call: str) -> AbstractAsyncContextManager[Callable[[], str]]:
        """Answer requests of the sessions of a call during the block, which are named ``CALL-NUMBER``.

        Gives a function that returns the address, such as ``http://127.0.0.1:4321``. Any thread may call it. It raises
        ConfigError where nothing can listen, and GenerationError after the block.
        """
        ...

    def offer(self, limits_s: tuple[float, float, float], token: str, *, names_tasks: bool) -> OfferedSessions:
        """Let a service elsewhere open, end and reward sessions.

        Args:
            limits_s: The most seconds from the request that opens a session to its end; in which somebody opens it; and
                from its end to its reward.
            token: What the service sends as its API key.
            names_tasks: Whether the service names tasks. Else the rows of the data are the tasks.
        """
        ...

    def close(self) -> None:
        """Listen no more."""
        ...


class Server(Protocol):
    """A service that listens until it is closed, or its process ends."""

    @property
    def url(self) -> str:
        """Its address, such as ``http://127.0.0.1:43210``."""
        ...


class RemoteSource(TokenSource, Protocol):
    """Draws tokens at generators in other processes.

    Attributes:
        room: How much of the sessions of this client each generator remembers; None for no limit.
    """

    room: SessionRoom | None

    def connect(self, urls: Sequence[str], positions: int | None, room: SessionRoom | None = None) -> None:
        """Use the generators at ``urls`` from now on. Generators that were used before keep their sessions."""
        ...

    def connected(self) -> AbstractAsyncContextManager[None]:
        """Keep connections during the block."""
        ...


class HttpService(Protocol):
    """What an entry point of the group ``podium.services`` is: a module or an object with these functions."""

    def open_gateway(self, host: str, ports: Sequence[int]) -> Gateway:
        """Return the address of the model for the sessions of a rollout worker.

        Args:
            host: The address to listen at. Anything but the loopback listens from now on.
            ports: The ports, of which the first free one is taken; 0 is any free port.

        Raises:
            PodiumError: The address cannot be used, no port is free, or no agent could know the address.
        """
        ...

    def connect_generators(self, urls: Sequence[str], token: str) -> RemoteSource:
        """Return what draws tokens at the addresses that ``serve_engine`` gave, with their token."""
        ...

    def serve_engine(
        self,
        engine: Engine,
        tokenizer: Any,
        data: DataConfig,
        sampling: SamplingParams,
        *,
        model: str,
        token: str,
        host: str,
        port: int,
    ) -> Server:
        """Serve the engine of a generator. Raises PodiumError if the address and port cannot be used."""
        ...

    def served(self, config: Any, cluster: Any, *, model: str, token: str) -> AbstractContextManager[Any]:
        """Start generators on ``cluster`` that answer the OpenAI API during the block, with the address ``url``."""
        ...


def load_service(purpose: str) -> HttpService:
    """Return the service over HTTP that an installed package brings.

    Args:
        purpose: What needs it, as the subject of a sentence.

    Raises:
        ConfigError: No installed package has one, several have, or it cannot be loaded.
    """
    entry = _find_entry()
    if entry is None:
        raise ConfigError(_explain_missing(purpose))
    with explain_raised(f"{purpose} needs {entry.value}, which cannot be loaded", __file__):
        return cast(HttpService, entry.load())


def open_gateway(host: str, ports: Sequence[int]) -> Gateway:
    """As :meth:`HttpService.open_gateway`. Without such a service, the sessions run until one asks for the address."""
    if _find_entry() is None and (host, tuple(ports)) == (_LOOPBACK, (0,)):
        return _NoGateway()
    return load_service("an address at environment.options.host and ports").open_gateway(host, ports)


class _NoGateway:
    """Sessions without an address."""

    def __init__(self) -> None:
        self.keys = SessionKeys()

    @asynccontextmanager
    async def open(self, service: Service, call: str) -> AsyncIterator[Callable[[], str]]:
        def refuse() -> str:
            raise ConfigError(_explain_missing("an agent that requests the address of the model"))

        yield refuse

    def offer(self, limits_s: tuple[float, float, float], token: str, *, names_tasks: bool) -> OfferedSessions:
        raise ConfigError(_explain_missing("an environment whose sessions run in a service elsewhere"))

    def close(self) -> None: ...


def _find_entry() -> EntryPoint | None:
    return find_installed(_GROUP, _NAME, _GROUP)


def _explain_missing(purpose: str) -> str:
    reason = "needs a package for HTTP, and none is installed (docs/serve.md)"
    return f"{purpose} {reason}: {explain_packages(_GROUP, _NAME)}"
