"""A model that answers over HTTP: the OpenAI API, and ids in and out. It is the entry point ``http`` of Podium's group
``podium.services``, and implements :class:`podium_agents.services.HttpService`.

app ──▶ podium_agents.service.service      HTTP ─▶ requests of conversations, texts and ids ─▶ recorded answers
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.rollout.engines import Engine
    from podium.rollout.sampling import SamplingParams
    from podium.rollout.tasks.config import DataConfig
    from podium.runs.config import InferenceConfig
    from podium.runtime import Cluster
    from podium_serve.gateway import Gateway
    from podium_serve.generator_client import RemoteTokens
    from podium_serve.server import Server
    from podium_serve.serving import ServedModel

__all__ = ["check_serving", "connect_generators", "open_gateway", "serve_engine", "serve_load_balancer", "served"]

_LONGEST: Final = 32768  # tokens, of a model that names no limit


def check_serving(host: str, port: int, token: str) -> None:
    """Check in advance, before a model is loaded, that a service can listen.

    Raises:
        ConfigError: ``token`` is empty.
        PodiumError: The address ``host`` and ``port`` cannot be used.
    """
    from podium_serve.server import listen

    if not token:
        raise ConfigError("the token of a service is empty, which would let everybody in: give a token")
    listen(host, port).close()


def open_gateway(host: str, ports: Sequence[int]) -> Gateway:
    """As :meth:`podium_agents.services.HttpService.open_gateway`."""
    from podium_serve.gateway import Gateway

    return Gateway(host, ports)


def connect_generators(urls: Sequence[str], token: str) -> RemoteTokens:
    """As :meth:`podium_agents.services.HttpService.connect_generators`."""
    from podium_serve.generator_client import RemoteTokens

    return RemoteTokens(urls, token)


def served(
    config: InferenceConfig, cluster: Cluster, *, model: str, token: str, host: str = "127.0.0.1", port: int = 0
) -> AbstractContextManager[ServedModel]:
    """Start generators that answer over HTTP during the block.

    Args:
        config: Settings of the model, its engine and the conversations, and in ``placement`` the number of ranks.
        cluster: Where the generators run. All of its processes must be on this machine.
        model: The name of the model for clients.
        token: The bearer token that clients send.
        host: The address to listen at. On loopback, the default, other users of the machine are refused.
        port: The port; 0 chooses a free port.

    Raises:
        ConfigError: The model cannot be loaded, or ``token`` is empty.
        PodiumError: The address or port cannot be used.
    """
    from podium_serve.serving import serve_model

    return serve_model(config, cluster, model=model, token=token, host=host, port=port)


def serve_load_balancer(urls: Sequence[str], *, token: str, host: str = "127.0.0.1", port: int = 0) -> Server:
    """Serve one address that passes requests to the services at ``urls``, with their ``token``, until the server is
    closed.
    """
    from podium_serve.load_balancer import make_load_balancer
    from podium_serve.server import Server

    return Server(make_load_balancer(urls, token), host, port)


def serve_engine(
    engine: Engine,
    tokenizer: Any,
    data: DataConfig,
    sampling: SamplingParams,
    *,
    model: str,
    token: str,
    host: str = "127.0.0.1",
    port: int = 0,
) -> Server:
    """Serve ``engine`` until the server is closed.

    Raises:
        PodiumError: The address ``host`` and ``port`` cannot be used.
    """
    from podium.rollout.tasks.chat_encoder import ChatEncoder
    from podium_agents.service.chat_format import chat_format
    from podium_agents.service.engine_client import EngineClient
    from podium_agents.service.service import Service
    from podium_serve.app import make_app
    from podium_serve.server import Server

    context = engine.positions or _LONGEST
    service = Service(
        EngineClient(engine),
        chat_format(ChatEncoder(tokenizer, data), tokenizer),
        tokenizer,
        model=model,
        context=context,
        stop_token_ids=sampling.stop_token_ids,
        stops=getattr(sampling, "stop", ()),
        most_tokens=4 * engine.config.max_sequences * context,
    )
    return Server(make_app(service, token), host, port)
