"""From a configuration and a model to the engine that generates."""

from __future__ import annotations

from torch import nn

from podium.rollout.engines.base import Engine, EngineConfig

__all__ = ["make_engine"]


def make_engine(config: EngineConfig, model: nn.Module, pad_token_id: int = 0) -> Engine:
    """The engine that ``config`` names, reading ``model``.

    Where ``model`` is unsharded and of the dtype to generate in, the engine shares its parameters: whoever trains them
    calls ``refresh(version)`` after each update. Otherwise the engine holds a copy that ``refresh`` fills.

    Raises:
        ConfigError: the engine cannot run this model, or is not installed; says why.
    """
    if config.name in ("auto", "native"):
        from podium.rollout.engines.native import NativeEngine, unsupported

        if config.name == "native" or unsupported(model) is None:
            return NativeEngine(config, model)
    if config.name == "vllm":
        from podium.rollout.engines.vllm import VllmEngine

        return VllmEngine(config, model)
    from podium.rollout.engines.transformers import TransformersEngine

    return TransformersEngine(config, model, pad_token_id)
