"""The experts that the engine transformers records are those that its model chose for each token."""

from __future__ import annotations

import copy

import pytest
import torch

from podium.algorithms import AlgorithmConfig
from podium.errors import ConfigError
from podium.rollout.engines import EngineConfig, check_engine, make_engine
from podium.rollout.engines.journal import Drawn
from podium.rollout.sampling import SamplingParams

from .conftest import MakeModel


def test_experts_of_prompts_and_completions_are_recorded(make_model: MakeModel, prompts: list[list[int]]) -> None:
    """Prompts are padded to one length, and completions end at different places, by tokens and by texts."""
    model = make_model("qwen3_moe", mlp_only_layers=[])
    engine = make_engine(EngineConfig(name="transformers", max_sequences=4), copy.deepcopy(model))
    engine.decode = lambda ids: "".join(chr(65 + id % 26) for id in ids)
    params = SamplingParams(max_new_tokens=9, n=2, stop_token_ids=tuple(range(8)))
    plain = engine.generate(prompts, params.to_request(stop=("B", "F")), range(20))
    recorded = engine.generate(
        prompts, params.to_request(stop=("B", "F"), record_experts=True), range(20), begun={3: Drawn([4], [-1.0], [0])}
    )
    lengths = {len(completion) for completion in recorded}
    assert len(lengths) > 2 and any(completion.stop for completion in recorded)
    for index, (before, completion) in enumerate(zip(plain, recorded, strict=True)):
        assert before.experts is None and torch.equal(before.token_ids, completion.token_ids)
        chosen: list[torch.Tensor] = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda *call, chosen=chosen: chosen.append(call[2][2]))
            for layer in model.model.layers
        ]
        with torch.no_grad():
            model(input_ids=torch.cat([torch.tensor(prompts[index // 2]), completion.token_ids])[None])
        for hook in hooks:
            hook.remove()
        assert completion.experts is not None and completion.experts.dtype == torch.int16
        assert torch.equal(completion.experts, torch.cat(chosen, -1)[:-1].short())


def test_what_is_not_recorded_is_refused(make_model: MakeModel) -> None:
    params = SamplingParams(max_new_tokens=1).to_request(record_experts=True)
    with pytest.raises(ConfigError, match="prompt 0 asks for record_experts, which NativeEngine does not serve"):
        make_engine(EngineConfig(name="native"), make_model("qwen3_moe")).generate([[4]], params, [1])
    with pytest.raises(ConfigError, match="record_experts: Qwen3ForCausalLM is no mixture of experts"):
        make_engine(EngineConfig(name="transformers"), make_model("qwen3")).generate([[4]], params, [1])
    replaying = AlgorithmConfig(options={"router_replay": "rollout"}).record_reasons
    for name in ("auto", "native"):
        with pytest.raises(
            ConfigError, match=f"engine.name = '{name}' with algorithm.options.router_replay = 'rollout'"
        ):
            check_engine(EngineConfig(name=name), replaying)
    check_engine(EngineConfig(name="transformers"), replaying)
    check_engine(EngineConfig(), AlgorithmConfig(options={"score_centering": 4}).record_reasons)
