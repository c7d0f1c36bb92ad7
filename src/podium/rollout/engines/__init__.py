"""Generation engines: one contract, several ways to draw completions from a language model."""

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium.rollout.engines.base import Engine as Engine
    from podium.rollout.engines.config import (
        EngineConfig as EngineConfig,
        find_engines as find_engines,
    )
    from podium.rollout.engines.engine_lookup import check_engine as check_engine, make_engine as make_engine
    from podium.rollout.engines.model import ModelEngine as ModelEngine
    from podium.rollout.engines.requests import (
        Aborted as Aborted,
        Event as Event,
        Failed as Failed,
        Finished as Finished,
        Request as Request,
        RequestId as RequestId,
        RequestQueue as RequestQueue,
        Tokens as Tokens,
        conclude as conclude,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
