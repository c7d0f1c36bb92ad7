"""A service over a small model that draws in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from podium.models import ModelConfig, char_tokenizer, load_model
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium_agents.service.chat_format import ChatFormat
from podium_agents.service.engine_client import EngineClient
from podium_agents.service.service import Service
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
        EngineClient(engine), ChatFormat(ChatEncoder(tokenizer, DataConfig()), tokenizer), tokenizer,
        model="tiny", context=512, stop_token_ids=[], most_tokens=4 * 8 * 512,
    )  # fmt: skip
    return service, lambda: finished


def random_service(
    tokenizer: Any,
    ends: Sequence[str] = ("<|im_end|>",),
    *,
    seed: int = 0,
    name: str = "native",
    rules: SamplingParams | None = None,
) -> Service:
    """Return a service over a model with random weights, for a tokenizer with a chat template. With ``rules`` it is
    that of a run."""
    shape = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(tokenizer) + 3, "max_position_embeddings": 2048,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = AutoConfig.for_model("qwen3", **shape, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    engine = make_engine(EngineConfig(name=name, max_sequences=16), model)
    engine.restrict(len(tokenizer))
    return Service(
        EngineClient(engine), ChatFormat(ChatEncoder(tokenizer, DataConfig()), tokenizer), tokenizer, model="tiny",
        context=2048, stop_token_ids=[tokenizer.convert_tokens_to_ids(end) for end in ends], most_tokens=1 << 40,
        rules=rules,
    )  # fmt: skip
