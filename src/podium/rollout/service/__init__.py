"""A model that answers over HTTP, and records what it sampled: the OpenAI API, and ids in and out.

app ──▶ service ──▶ tokens        HTTP ─▶ requests of conversations, texts and ids ─▶ what draws ids
          │  └────▶ chat_format   messages ─▶ ids ─▶ messages
          └───────▶ sessions      calls ─▶ rows that train
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.rollout.engines import Engine
    from podium.rollout.sampling import SamplingParams
    from podium.rollout.service.server import Server
    from podium.rollout.tasks.config import DataConfig

__all__ = ["serve_engine"]

_LONGEST: Final = 32768  # tokens, of a model that names no limit


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
        PodiumError: Nobody can listen at ``host`` and ``port``.
    """
    try:
        from podium.rollout.service.app import make_app
        from podium.rollout.service.server import Server
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}, which is not installed: pip install 'podium[serve]'") from None
    from podium.rollout.service.chat_format import chat_format
    from podium.rollout.service.engine_client import EngineClient
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
        most_tokens=4 * engine.config.max_sequences * context,
    )
    return Server(make_app(service, token), host, port)
