"""Dropout and router noise act in training by examples, and not in reinforcement learning unless asked for."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from podium.algorithms import AlgorithmConfig
from podium.errors import ConfigError
from podium.models import LoraConfig, ModelConfig, load_model, loading
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, PPOConfig
from podium.training import OptimConfig
from podium.workers import Policy
from tests.integration.training import MODEL, metrics_rows, tiny, train
from tests.unit.training.families import APART, MIXING
from tests.unit.training.test_row_isolation import TOKENIZER
from tests.unit.workers.tiny import ADAPTED, TINY, recorded

OLD = {key: value for key, value in APART["llama"].items() if key != "num_key_value_heads"}
NOISY: dict[str, dict[str, Any]] = {
    "qwen3": {**APART["qwen3"], "attention_dropout": 0.5},
    "seed_oss": {**APART["qwen3"], "attention_dropout": 0.5, "residual_dropout": 0.5},
    "gpt2": APART["gpt2"],
    "gpt_bigcode": APART["gpt2"],
    "xglm": MIXING["xglm"],
    "opt": {
        **{"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 48},
        **{"max_position_embeddings": 64, "word_embed_proj_dim": 32},
    },
    "phimoe": {**APART["llama"], "num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.5},
}
FROZEN = OptimConfig(lr=0.0)
EXAMPLES = AlgorithmConfig(loss="cross_entropy")


def noisy(family: str, **settings: Any) -> ModelConfig:
    return ModelConfig(config={"model_type": family, **NOISY[family]}, tokenizer=TOKENIZER, **settings)


@pytest.mark.each_value
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # gpt_bigcode's, when it is imported
@pytest.mark.parametrize("family", NOISY)
def test_an_update_without_a_step_leaves_every_ratio_at_one(family: str, checkpointing: bool) -> None:
    policy, batch = Policy(noisy(family, gradient_checkpointing=checkpointing), FROZEN), recorded((5, 9, 12))
    batch = batch.merge(policy.logprobs(batch), keep="other")
    first, second = policy.update(batch), policy.update(batch)
    assert first[metrics.RATIO_MAX] == pytest.approx(1.0, abs=1e-4)
    assert first[metrics.CLIP_FRACTION] == 0
    assert first[metrics.GRAD_NORM] == second[metrics.GRAD_NORM] > 0


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_noise_acts_on_examples_and_where_it_is_asked_for(family: str) -> None:
    batch = recorded((5, 9, 12))
    for policy in (Policy(noisy(family), FROZEN, None, EXAMPLES), Policy(noisy(family, dropout=True), FROZEN)):
        assert policy.update(batch)[metrics.GRAD_NORM] != policy.update(batch)[metrics.GRAD_NORM]
    policy = Policy(noisy(family, dropout=False), FROZEN, None, EXAMPLES)
    assert policy.update(batch)[metrics.GRAD_NORM] == policy.update(batch)[metrics.GRAD_NORM]


def test_dropout_of_adapters_acts_in_one_update_a_step_and_is_refused_in_several(tmp_path: Path) -> None:
    model = replace(ADAPTED, lora=LoraConfig(rank=4, dropout=0.5))
    policy, batch = Policy(model, FROZEN), recorded((5, 9, 12))
    assert policy.update(batch)[metrics.GRAD_NORM] != policy.update(batch)[metrics.GRAD_NORM]
    with pytest.raises(ConfigError, match=r"model\.lora\.dropout = 0\.5 with .* = 2 updates a step.*to 0"):
        Policy(model, FROZEN, None, AlgorithmConfig(minibatches=2))
    with pytest.raises(ConfigError, match=r"model\.lora\.dropout = 0\.5 with .* = 2 updates a step"):
        tiny(GRPOConfig, tmp_path, model={"lora": {"dropout": 0.5}}, algorithm={"epochs": 2})
    Policy(model, FROZEN, None, replace(EXAMPLES, epochs=2))


@pytest.mark.parametrize(
    ("algorithm", "what"),
    [
        ({"minibatches": 2}, "2 updates a step"),
        ({"epochs": 3}, "3 updates a step"),
        ({"correction": "truncate"}, "compare the policy with the generator"),
        ({"correction": ["high_entropy", "geometric"]}, "compare the policy with the generator"),
        ({"correction": "bypass"}, "compare the policy with the generator"),
        ({"loss": "dppo_tv"}, "compare the policy with the generator"),
        ({"loss": {"ppo_clip": 1.0, "dppo_kl": 0.5}}, "compare the policy with the generator"),
        ({"correction": "high_entropy"}, ""),
        ({"kl_in": "reward", "kl_coef": 0.1}, ""),
        ({"correction": "none"}, ""),
    ],
)
@pytest.mark.parametrize(
    ("model", "key"),
    [({"lora": {"dropout": 0.5}}, r"model\.lora\.dropout"), ({"dropout": True}, r"model\.dropout")],
    ids=["adapters", "model"],
)
def test_dropout_is_refused_where_an_update_compares_its_log_probabilities(
    tmp_path: Path, model: dict[str, Any], key: str, algorithm: dict[str, Any], what: str
) -> None:
    with nullcontext() if not what else pytest.raises(ConfigError, match=rf"^{key} = .*{what}.*; set {key} to "):
        tiny(GRPOConfig, tmp_path, model={**MODEL, **model}, algorithm=algorithm)


def test_dropout_is_refused_where_the_schedule_asks_for_a_correction(tmp_path: Path) -> None:
    """The correction auto means truncate where older weights generate."""
    settings: dict[str, Any] = {"model": {**MODEL, "dropout": True}, "placement": {"layout": "split"}}
    with pytest.raises(ConfigError, match=r"correction = 'truncate', which compare"):
        tiny(GRPOConfig, tmp_path, **settings, run={"schedule": "one_step_off"})
    tiny(GRPOConfig, tmp_path, **settings, run={"schedule": "one_step_off"}, algorithm={"correction": "none"})


@pytest.mark.parametrize("kl_in", ["reward", "none"])
@pytest.mark.parametrize("noise", ["adapters", "model"])
def test_dropout_changes_no_ratio_of_a_run_with_one_update(tmp_path: Path, noise: str, kl_in: str) -> None:
    """A KL in the reward needs log-probabilities from before the update, which have no dropout."""
    model = {**MODEL, "lora": {"rank": 4, "dropout": 0.5}}
    if noise == "model":
        model = {
            **MODEL,
            "config": {**cast("dict[str, Any]", MODEL["config"]), "attention_dropout": 0.5},
            "dropout": True,
        }
    algorithm = {"kl_in": kl_in, "kl_coef": 0.1 if kl_in == "reward" else 0.0}
    rows = metrics_rows(train(tiny(PPOConfig, tmp_path, model=model, algorithm=algorithm, eval={"items": 0})))
    ratios = [[row[name] for name in (metrics.RATIO_MEAN, metrics.RATIO_MAX, metrics.APPROX_KL)] for row in rows]
    assert ratios == [[1.0, 1.0, 0.0]] * 2


def test_layers_are_computed_again_in_the_backward_pass_of_reinforcement_too() -> None:
    policy, calls = Policy(replace(TINY, gradient_checkpointing=True), FROZEN), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    loading.decoder_layers(policy.model)[0].get_submodule("mlp").register_forward_pre_hook(count)
    policy.update(recorded((5, 9)))
    assert calls == 2
    policy.logprobs(recorded((5, 9)))
    assert calls == 3


def test_a_model_without_named_layers_cannot_be_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "decoder_layers", lambda model: [])
    with pytest.raises(ConfigError, match=r"model\.gradient_checkpointing: transformers names no layers of Qwen3"):
        load_model(replace(TINY, gradient_checkpointing=True))


def test_what_dropout_draws_follows_from_the_seed() -> None:
    """torch seeds each process by chance, and a run that is begun again must be the same run."""
    states: list[torch.Tensor] = []
    for chance in (1, 2):
        torch.manual_seed(chance)
        Policy(noisy("qwen3"), FROZEN)
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1])
