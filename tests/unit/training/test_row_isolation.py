"""Rows that share a forward pass are tried on the model itself, and attention has what the model needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.errors import ConfigError
from podium.models import LoraConfig, ModelConfig, load_model
from podium.models.adapters import with_adapters
from podium.models.attention import choose_attention
from podium.rollout.engines import EngineConfig
from podium.rollout.engines.transformers import TransformersEngine
from podium.rollout.sampling import SamplingParams
from podium.telemetry import Note, subscribe
from podium.trainer import PPOConfig, PPOTrainer
from podium.training import OptimConfig, ParallelConfig, TrainEngine, row_isolation
from podium.training.micro_batches import cut, plan
from podium.training.row_isolation import choose_batching, interference
from podium.training.scoring import score_tokens
from podium.workers import Policy
from tests.integration.training import tiny
from tests.unit.training.families import APART, LONGROPE, MIXING, make
from tests.unit.workers.tiny import ADAPTED, TINY, oracle_logprobs, recorded

CPU = torch.device("cpu")
TOKENIZER = "chars:" + "".join(chr(code) for code in range(33, 77))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", APART)
def test_packed_rows_are_proven_apart(family: str, dtype: torch.dtype) -> None:
    model = make(family, dtype=dtype)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert interference(model, CPU, dtype, packed=True) == ""
    assert interference(model, CPU, dtype) == ""
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", MIXING)
def test_packed_rows_that_mix_are_found(family: str, dtype: torch.dtype) -> None:
    model = make(family, dtype=dtype)
    choose_attention(model, "auto")
    if family == "gptj" and not interference(model, CPU, dtype, packed=True):
        pytest.skip("transformers 5.24 keeps rows of GPT-J apart")
    assert interference(model, CPU, dtype, packed=True) != ""


@pytest.mark.parametrize("model", [TINY, ADAPTED], ids=["plain", "lora"])
def test_the_proof_covers_products_of_half_precision_and_adapters(model: ModelConfig) -> None:
    loaded = load_model(model)
    assert interference(loaded, CPU, torch.bfloat16, packed=True) == ""
    mixing = with_adapters(make("qwen3_5_text"), LoraConfig(targets=("q_proj",)), 0)
    assert interference(mixing, CPU, torch.bfloat16, packed=True) != ""


def test_auto_pads_what_it_cannot_pack_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelConfig, "packed", lambda self, device: self.batching != "padded")
    batching, note = choose_batching(make("qwen3_5_text"), ParallelConfig(), CPU, torch.float32)
    assert batching == "padded"
    head, _, reason = note.partition("it cannot take packed ones: ")
    assert head == "Qwen3_5ForCausalLM gets padded rows, because "
    own_refusal = "can't keep packed sequences apart" in reason  # of transformers from 5.24 on
    assert own_refusal or reason == "what it computes for one row depends on the other row or on padding"
    assert choose_batching(make("llama"), ParallelConfig(), CPU, torch.float32) == ("packed", "")
    with pytest.raises(ConfigError, match=r"parallel\.batching=packed: GptOss.* needs s_aux.*use auto or padded"):
        choose_batching(make("gpt_oss"), ParallelConfig(batching="packed"), CPU, torch.float32)


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_rows_with_other_rotary_factors_are_apart(batching: Any) -> None:
    model = load_model(ModelConfig(config=LONGROPE, tokenizer=TOKENIZER))
    batch = recorded((5, 40, 9, 17, 18))
    wanted = torch.cat([oracle_logprobs(model, row[:-1]) for row in batch.jagged("tokens").unbind()])
    parallel = ParallelConfig(batching=batching)
    engine = TrainEngine(model, optim=None, parallel=parallel, device=CPU)
    found = engine.evaluate(batch, lambda micro: {"x": score_tokens(model, batch, micro).logprobs}, ("x",))["x"]
    own = torch.cat([row[:-1] for row in found.unbind()])
    mask = torch.cat([row[:-1] for row in batch.jagged("loss_mask").unbind()])
    assert torch.allclose(own[mask], wanted[mask], atol=1e-4)


def test_a_policy_that_asks_for_packing_in_vain_is_refused_at_its_start() -> None:
    config = ModelConfig(config={"model_type": "qwen3_5_text", **MIXING["qwen3_5_text"]}, tokenizer=TOKENIZER)
    with pytest.raises(ConfigError, match=r"parallel\.batching=packed: Qwen3_5ForCausalLM"):
        Policy(config, OptimConfig(), ParallelConfig(batching="packed"))
    assert Policy(config, OptimConfig()).note() == ""


def let_padding_show(model: Any) -> None:
    """Scale the model's output by the number of padding tokens in its input."""
    amounts = [0.0]

    def count(module: Any, args: Any, kwargs: Any) -> None:
        amounts.append(float(((args[0] if args else kwargs["input_ids"]) == 0).sum()))

    model.register_forward_pre_hook(count, with_kwargs=True)
    model.model.norm.register_forward_hook(lambda module, args, output: output * (1 + amounts[-1]))


def test_rows_of_one_length_go_together_where_padding_changes_a_row() -> None:
    model: Any = load_model(TINY)
    let_padding_show(model)
    assert choose_batching(model, ParallelConfig(), CPU, torch.float32)[0] == "equal"
    engine = TrainEngine(model, optim=None, parallel=ParallelConfig(), device=CPU)
    assert "rows of one length" in engine.note
    batch = recorded((9, 9, 5, 17, 5))

    def compute(micro: Any) -> dict[str, torch.Tensor]:
        return {"logprobs": score_tokens(engine.model, batch, micro).logprobs}

    got = engine.evaluate(batch, compute, ("logprobs",))["logprobs"].values
    alone = torch.cat([oracle_logprobs(model, row) for row in batch.jagged("tokens").unbind()])
    assert torch.allclose(got, alone * batch.jagged("loss_mask").values, atol=1e-5)


_ENCODER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 48}


@pytest.mark.parametrize(
    ("family", "settings", "remedy"),
    [
        ("bert", {**_ENCODER, "num_attention_heads": 2}, "set is_decoder to true"),
        ("roberta", {**_ENCODER, "num_attention_heads": 2, "max_position_embeddings": 64}, "set is_decoder to true"),
        ("xlm", {"emb_dim": 32, "n_layers": 1, "n_heads": 2, "vocab_size": 48}, "choose a causal language model"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "set use_bidirectional_attention to false"),
    ],
)
def test_a_model_that_reads_ahead_is_refused(family: str, settings: dict[str, Any], remedy: str) -> None:
    model = make(family, **settings)
    with pytest.raises(ConfigError, match=f"reads texts in both directions.*{remedy}"):
        TrainEngine(model, optim=OptimConfig(), parallel=ParallelConfig(), device=CPU)
    alone = "padded" if family == "xlm" else "equal"  # XLM masks padding by its id
    assert TrainEngine(model, optim=None, parallel=ParallelConfig(), device=CPU, causal=False).batching == alone


@pytest.mark.parametrize(
    ("family", "settings"), [("bert", {**_ENCODER, "num_attention_heads": 2, "is_decoder": True}), ("gemma3_text", {})]
)
def test_the_same_model_is_taken_where_it_reads_forwards_alone(family: str, settings: dict[str, Any]) -> None:
    assert choose_batching(make(family, **settings), ParallelConfig(), CPU, torch.float32) == ("padded", "")


def test_packed_rows_are_not_read_ahead_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.training.row_isolation.interference", lambda *args, **rows: row_isolation._AHEAD)
    model, packed = make("llama"), ParallelConfig(batching="packed")
    with pytest.raises(ConfigError, match="depends on later tokens"):
        choose_batching(model, packed, CPU, torch.float32)
    assert choose_batching(model, packed, CPU, torch.float32, causal=False) == ("packed", "")


def test_models_of_few_positions_are_tried_on_shorter_rows() -> None:
    assert interference(make("gpt2", n_positions=8), CPU, torch.float32, packed=True) == ""
    engine = TransformersEngine(EngineConfig(), make("gpt2", n_positions=8, eos_token_id=None))
    assert len(engine.generate([[5, 9, 3], [7]], SamplingParams(max_new_tokens=3), [0, 1])) == 2


def test_a_run_shows_the_note_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelConfig, "packed", lambda self, device: True)
    shape = {"model_type": "qwen3_5_text", **{k: v for k, v in MIXING["qwen3_5_text"].items() if k != "vocab_size"}}
    config = tiny(PPOConfig, tmp_path, run={"steps": 1}, eval={"items": 0}, model={"config": shape})
    events: list[object] = []
    forget = subscribe(events.append)
    PPOTrainer(config, cluster="inline", show=False).fit()
    forget()
    said = "Qwen3_5ForCausalLM gets padded rows, because it cannot take packed ones"
    assert sum(event.text.startswith(said) for event in events if isinstance(event, Note)) == 1


def test_equal_rows_are_planned_by_length_and_budget() -> None:
    assert plan([4, 7, 4, 4, 7], 8, packed=False, equal=True) == [[1], [4], [0, 2], [3]]


@pytest.mark.parametrize(
    ("family", "implementation"),
    [("qwen3", "sdpa"), *((family, "eager") for family in ("gemma2", "vaultgemma", "gpt_oss", "mamba", "bloom"))],
)
def test_auto_attention_is_what_the_model_needs(family: str, implementation: str) -> None:
    shape = {"model_type": family, **(APART | MIXING)[family]}
    model = load_model(ModelConfig(config=shape, tokenizer=TOKENIZER))
    assert model.config._attn_implementation == implementation


def test_a_soft_cap_counts_under_auto_and_is_not_left_out_of_sdpa() -> None:
    shape = {"model_type": "gemma2", **MIXING["gemma2"], "attn_logit_softcapping": 0.01, "initializer_range": 0.5}
    config = ModelConfig(config=shape, tokenizer=TOKENIZER)
    ids = torch.arange(12)[None]
    eager = load_model(replace(config, attention="eager"))
    assert torch.equal(load_model(config)(ids).logits, eager(ids).logits)
    has_sdpa = load_model(config)._supports_sdpa  # up to transformers 5.23
    refusal = r"model\.attention='sdpa' leaves out softcap of Gemma2ForCausalLM"
    with pytest.raises(ConfigError, match=refusal if has_sdpa else "no attention of the kind that model.attention"):
        load_model(replace(config, attention="sdpa"))
    no_cap = replace(config, config={**shape, "attn_logit_softcapping": None})
    assert load_model(no_cap).config._attn_implementation == ("sdpa" if has_sdpa else "eager")


@pytest.mark.parametrize("family", ["gpt_oss", "mamba", "bloom", "gpt_neo", "gptj", "mpt", "xglm"])
def test_models_that_refuse_sdpa_train_under_auto(family: str) -> None:
    shape = {"model_type": family, **MIXING[family]}
    policy = Policy(ModelConfig(config=shape, tokenizer=TOKENIZER), OptimConfig(lr=1e-3))
    batch = recorded((5, 9))
    assert policy.update(batch)["policy/grad_norm"] > 0


def test_packed_attention_refuses_what_it_does_not_compute() -> None:
    model, batch = make("gemma2"), recorded((5, 9))
    (micro,) = cut(batch, 100, packed=True)
    with pytest.raises(ConfigError, match="Gemma2Attention needs softcap, which attention over packed rows lacks"):
        score_tokens(model, batch, micro)
