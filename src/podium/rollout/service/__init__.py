"""A model that answers over HTTP, and records what it sampled: the OpenAI API, and ids in and out.

app ──▶ service ──▶ token_source  HTTP ─▶ requests of conversations, texts and ids ─▶ what draws ids
          │  └────▶ chat_format   messages ─▶ ids ─▶ messages
          └───────▶ sessions      calls ─▶ rows that train
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from podium.errors import ConfigError
from podium.extras import install_command

if TYPE_CHECKING:
    from podium.rollout.engines import Engine
    from podium.rollout.sampling import SamplingParams
    from podium.rollout.service.server import Server
    from podium.rollout.tasks.config import DataConfig

__all__ = ["check_installed", "check_serving", "serve_engine", "serve_load_balancer"]

_LONGEST: Final = 32768  # tokens, of a model that names no limit


def check_installed() -> None:
    """Raise ConfigError if the extra ``serve`` is not installed."""
    for name in ("starlette", "uvicorn", "httpx2"):
        if find_spec(name) is None:
            raise ConfigError(f"serving needs {name}, which is not installed: {install_command('serve')}")


def check_serving(host: str, port: int, token: str) -> None:
    """Check in advance, before a model is loaded, that a service can listen.

    Raises:
        ConfigError: The extra ``serve`` is not installed, or ``token`` is empty.
        PodiumError: The address ``host`` and ``port`` cannot be used.
    """
    check_installed()
    from podium.rollout.service.server import listen

    if not token:
        raise ConfigError("the token of a service is empty, which would let everybody in: give a token")
    listen(host, port).close()


def serve_load_balancer(urls: Sequence[str], *, token: str, host: str = "127.0.0.1", port: int = 0) -> Server:
    """Serve one address that passes requests to the services at ``urls``, with their ``token``, until the server is
    closed.
    """
    from podium.rollout.service.load_balancer import make_load_balancer
    from podium.rollout.service.server import Server

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
        ConfigError: The extra ``serve`` is not installed.
        PodiumError: The address ``host`` and ``port`` cannot be used.
    """
    check_installed()
    from podium.rollout.service.app import make_app
    from podium.rollout.service.chat_format import chat_format
    from podium.rollout.service.engine_client import EngineClient
    from podium.rollout.service.server import Server
    from podium.rollout.service.service import Service
    from podium.rollout.tasks.writer import Writer

    context = engine.positions or _LONGEST
    service = Service(
        EngineClient(engine),
        chat_format(Writer(tokenizer, data), tokenizer),
        tokenizer,
        model=model,
        context=context,
        stop_token_ids=sampling.stop_token_ids,
        stops=getattr(sampling, "stop", ()),
        most_tokens=4 * engine.config.max_sequences * context,
    )
    return Server(make_app(service, token), host, port)
