"""Whether the model has room for the longest prompt and its completion: found before the first step, not in between."""

from __future__ import annotations

from collections.abc import Mapping

from podium.errors import ConfigError
from podium.trainer.prompts import PromptSource
from podium.workers import ModelConfig
from podium.workers.models import longest_text

__all__ = ["check_lengths"]


def check_lengths(model: ModelConfig, max_new_tokens: int, sources: Mapping[str, PromptSource]) -> None:
    """Compare the longest prompts, with a completion of ``max_new_tokens``, with the model's positions.

    Args:
        sources: by what they are called: "training", "held-out".

    Raises:
        ConfigError: one does not fit; names the settings that would make it fit.
    """
    most = longest_text(model) if sources else None
    for what, source in sources.items():
        if most is not None and source.longest + max_new_tokens > most:
            room = most - max_new_tokens
            shorter = f", or data.max_prompt_tokens to {room} (data.overlong says what becomes of longer ones)"
            raise ConfigError(
                f"the longest {what} prompt has {source.longest} tokens, which with sampling.max_new_tokens = "
                f"{max_new_tokens} is more than the model's {most} positions: lower sampling.max_new_tokens"
                + (shorter if room > 0 else "")
            )
