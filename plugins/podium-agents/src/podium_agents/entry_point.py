"""What Podium finds by the entry point ``sessions`` of the group ``podium.sessions``, imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from podium.lazy import lazy_exports
from podium.rollout.environments import EnvironmentConfig

if TYPE_CHECKING:
    from podium_agents.conversation_texts import conversations as conversations
    from podium_agents.environments.resolve import resolve_environment as resolve_environment
    from podium_agents.sessions import Sessions as Sessions
    from podium_agents.tasks import check_conversations as check_conversations, load_tasks as load_tasks
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)


def list_arguments(environment: EnvironmentConfig) -> dict[str, Any]:
    """Return the token of a service elsewhere that runs the sessions, if one does."""
    from podium_agents.environments.outside import is_outside, read_token

    return {"token": read_token()} if is_outside(environment) else {}


def check_services(environment: EnvironmentConfig, *, apart: bool) -> None:
    """As :meth:`podium.rollout.environments.SessionPackage.check_services`."""
    from podium_agents.environments.outside import is_outside
    from podium_agents.services import load_service

    if is_outside(environment):
        load_service(environment.shown)
    if apart:
        load_service(f"placement: {environment.name!r} with generators in processes of their own")


def connect_engine(engine: Any) -> Any:
    """As :meth:`podium.rollout.environments.SessionPackage.connect_engine`."""
    from podium_agents.service.engine_client import EngineClient

    return EngineClient(engine)


def serve_engine(engine: Any, tokenizer: Any, data: Any, sampling: Any, **address: Any) -> Any:
    """As :meth:`podium.rollout.environments.SessionPackage.serve_engine`."""
    from podium_agents.services import load_service

    return load_service("a generator that answers requests").serve_engine(engine, tokenizer, data, sampling, **address)
