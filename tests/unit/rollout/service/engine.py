"""A service over a small model that draws in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from podium.models import ModelConfig, char_tokenizer, load_model
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.service.chat_format import ChatFormat
from podium.rollout.service.engine_client import EngineClient
from podium.rollout.service.service import Service
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.writer import Writer
from tests.unit.rollout.service.scripted import ALPHABET, CHATML, SPECIAL


def engine_service() -> tuple[Service, Callable[[], int]]:
    """Return the service, and a function that says how many completions its engine has finished."""
    tokenizer = char_tokenizer(ALPHABET, chat_template=CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL]})  # type: ignore[arg-type]
    settings = {
        "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(tokenizer),
        "max_position_embeddings": 512,
    }  # fmt: skip
    torch.manual_seed(0)
    model = load_model(ModelConfig(config=settings, tokenizer=f"chars:{ALPHABET}"))
    engine = make_engine(EngineConfig(max_sequences=8), model)
    finished, poll = 0, engine.poll

    def count(*args: Any, **how: Any) -> Any:
        nonlocal finished
        events = poll(*args, **how)
        finished += sum(type(event).__name__ == "Finished" for event in events)
        return events

    engine.poll = count  # type: ignore[method-assign] - counted for the test
    service = Service(
        EngineClient(engine), ChatFormat(Writer(tokenizer, DataConfig()), tokenizer), tokenizer,
        model="tiny", context=512, stop_token_ids=[], most_tokens=4 * 8 * 512,
    )  # fmt: skip
    return service, lambda: finished
