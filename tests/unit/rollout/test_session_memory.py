"""Sessions that wait for the engine's memory, so that no turn computes its history again."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.sessions import make_tokenizer
from podium.rollout.engines import EngineConfig
from podium.rollout.environments import SessionLimits
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium_agents.environments.client import Client
from podium_agents.environments.runner import Episode, live
from podium_agents.service.admission import Admission
from podium_agents.service.chat_format import chat_format
from podium_agents.service.engine_client import EngineClient
from podium_agents.service.service import Service
from podium_native import NativeEngine

DRAWN, TURNS, SESSIONS = 12, 8, 136
TOKENS = 2 * 16 * 352  # for which the engine has memory, half of them in lanes
POSITION_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values, two layers, two kv heads, head_dim 16, float32


def make_engine(tokens: int) -> NativeEngine:
    """An engine of 16 lanes whose memory has room for so many positions."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3", vocab_size=len(make_tokenizer()), **shape)
    ).eval()
    gib = tokens * POSITION_BYTES / 2**30
    return NativeEngine(EngineConfig(name="native", max_sequences=16, cache_gib=gib), model)


def live_sessions(engine: NativeEngine, sessions: int, **limits: Any) -> tuple[list[Episode], int]:
    """Live sessions of which each has ``TURNS`` turns. Return them, and the number of tokens that were new to the
    engine. These are all that sessions added, and the last token of each answer, which decoding does not read."""
    tokenizer, chance = make_tokenizer(), random.Random(0)
    form = chat_format(ChatEncoder(tokenizer, DataConfig()), tokenizer)
    rules = SamplingParams(max_new_tokens=DRAWN)
    service = Service(
        *(EngineClient(engine), form, tokenizer),
        **{"model": "m", "context": 1024, "stop_token_ids": (), "most_tokens": 1 << 60, "rules": rules},
    )

    async def play(task: Any, client: Client) -> float:
        said = [{"role": "user", "content": "".join(chance.choices("abc ", k=20))}]
        for _ in range(TURNS):
            reply = await client.chat(said)
            said += [reply.message, {"role": "user", "content": "".join(chance.choices("abc ", k=8))}]
        return 1.0

    names = [f"s-{number}" for number in range(sessions)]
    episodes = asyncio.run(
        live(
            *(play, [{}] * sessions, range(sessions), names, service),
            SessionLimits(at_once=sessions, **limits),
            address=lambda: "",
        )
    )
    rows = [row for episode in episodes for one in episode.trajectories for row in one.session.rows]
    assert not any(episode.failure for episode in episodes)
    assert len(rows) == sessions
    assert all(len(row.turns) == TURNS for row in rows)
    return episodes, sum(len(row.ids) - sum(row.sampled) + TURNS - 1 for row in rows)


def test_four_times_as_many_sessions_as_fit_compute_what_is_new() -> None:
    engine = make_engine(TOKENS)
    episodes, new = live_sessions(engine, SESSIONS)
    assert engine.prompt_tokens is not None
    assert engine.prefilled_tokens <= 1.05 * new
    assert sum(episode.waited_s > 0 for episode in episodes) > 64
    longest = max(len(one.session.rows[0].ids) for episode in episodes for one in episode.trajectories)
    assert SESSIONS * longest >= 4 * TOKENS


@pytest.mark.exhaustive
def test_without_admission_each_turn_computes_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "begin", lambda self, name: None)
    engine = make_engine(TOKENS)
    episodes, new = live_sessions(engine, SESSIONS // 2)
    assert engine.prefilled_tokens > 2 * new
    assert not any(episode.waited_s for episode in episodes)
