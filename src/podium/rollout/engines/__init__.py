"""Generation engines: one contract, several ways to draw completions from a language model."""

from podium.rollout.engines.base import Engine, EngineConfig, EngineName
from podium.rollout.engines.factory import make_engine

__all__ = ["Engine", "EngineConfig", "EngineName", "make_engine"]
