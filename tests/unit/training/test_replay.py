"""Training sends tokens to the experts that another pass chose, with the weights of the current logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import PhimoeConfig, PhimoeForCausalLM

from podium.algorithms import AlgorithmConfig, check_functions
from podium.data import Batch
from podium.errors import ConfigError, DataError
from podium.models import load_model
from podium.training import OptimConfig, ParallelConfig
from podium.training.micro_batches import cut
from podium.training.routing import find_routers, record_routes, replay_routes
from podium.workers import Policy
from tests.unit.training.families import make
from tests.unit.training.test_routing import EXPERTS, MIXTURE, PLAIN
from tests.unit.workers.tiny import TINY, recorded

LAYERS, CHOSEN = 2, 2


@contextmanager
def send(model: Any, experts_TC: Tensor) -> Iterator[None]:
    """The oracle for one row: softmax over all experts, then over the given ones alone."""
    handles: list[Any] = []
    for layer, router in enumerate(find_routers(model)):
        experts_TJ = experts_TC[:, CHOSEN * layer : CHOSEN * (layer + 1)].long()

        def change(_router: Any, _args: Any, output: Any, experts_TJ: Tensor = experts_TJ) -> Any:
            p_TJ = output[0].softmax(-1).gather(-1, experts_TJ)
            return output[0], p_TJ / p_TJ.sum(-1, keepdim=True), experts_TJ

        handles.append(router.register_forward_hook(change))
    yield
    for handle in handles:
        handle.remove()


def with_experts(batch: Batch) -> Batch:
    """Experts of another policy, drawn for each token; alike for rows that have one prompt."""
    tokens = batch.jagged("tokens")
    generator = torch.Generator().manual_seed(1)
    table = torch.rand(64, 32, LAYERS, EXPERTS["num_experts"], generator=generator).topk(CHOSEN, -1).indices
    within = torch.cat([torch.arange(int(length)) for length in tokens.lengths])
    experts_NC = table[within, tokens.values].flatten(1).to(torch.int16)
    return batch.with_columns({"experts": tokens.like(experts_NC)})


def gradient_of(batch: Batch, again: bool = False, **parallel: Any) -> tuple[float, list[Tensor]]:
    algorithm = AlgorithmConfig(minibatches=2, options={"router_replay": "old"})
    config = replace(MIXTURE, config={**(MIXTURE.config or {}), "norm_topk_prob": True}, gradient_checkpointing=again)
    policy = Policy(config, OptimConfig(lr=1e-3, grad_clip=0.0), ParallelConfig(**parallel), algorithm)
    row = policy.accumulate(batch)
    return row["loss"], [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in policy.model.parameters()]


@pytest.mark.parametrize("lengths", [(5, 9, 30, 2, 17, 12, 23, 3), None], ids=["rows", "shared prompts"])
def test_an_update_replays_the_experts_of_each_token(lengths: tuple[int, ...] | None) -> None:
    """However micro-batches are cut and layers are computed again, in values and gradients, by a pass over each row."""
    batch = with_experts(recorded(lengths))
    model = load_model(replace(MIXTURE, config={**(MIXTURE.config or {}), "norm_topk_prob": True}))
    names = ("tokens", "loss_mask", "loss_weights", "advantages", "old_logprobs", "experts")
    loss = torch.zeros(())
    for tokens, mask, weight, advantage, old, experts in zip(
        *(batch.jagged(name).unbind() for name in names), strict=True
    ):
        places = mask.bool().nonzero()[:, 0]
        with send(model, experts):
            logits = model(input_ids=tokens[None]).logits[0, places - 1]
        ratio = (logits.log_softmax(-1).gather(1, tokens[places, None])[:, 0] - old[places]).exp()
        surrogate = torch.minimum(ratio * advantage[places], ratio.clamp(0.8, 1.28) * advantage[places])
        loss = loss - (weight[places] * surrogate).sum()
    expected = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    turned = batch.take(list(range(len(batch)))[::-1])
    for rows, again, parallel in (
        (turned, True, {"micro_batch_tokens": 40}),
        (batch, False, {"batching": "packed"}),
    ):
        value, gradients = gradient_of(rows, again, **parallel)
        assert value == pytest.approx(float(loss.detach()), rel=1e-4)
        for after, right in zip(gradients, expected, strict=True):
            torch.testing.assert_close(after, torch.zeros_like(after) if right is None else right, rtol=1e-3, atol=2e-5)
    router = find_routers(model)[0].weight
    assert expected[[p is router for p in model.parameters()].index(True)].abs().max() > 1e-4  # routers learn


def test_the_policy_notes_what_it_chose_before_the_update_and_keeps_to_it() -> None:
    for lengths in ((5, 9, 30, 2), None):
        batch = recorded(lengths)
        algorithm = AlgorithmConfig(minibatches=2, options={"router_replay": "old"})
        policy = Policy(MIXTURE, OptimConfig(lr=1e-3), ParallelConfig(micro_batch_tokens=40), algorithm)
        scored = policy.logprobs(batch)
        for tokens, experts in zip(batch.jagged("tokens").unbind(), scored.jagged("experts").unbind(), strict=True):
            with record_routes(policy.model) as routes:
                policy.model(input_ids=tokens[None])
            chosen = torch.cat([route.experts for route in routes], -1)
            assert torch.equal(chosen[:-1].short(), experts[:-1])
        batch = batch.drop("old_logprobs").merge(scored)
        for router in cast("list[Any]", find_routers(policy.model)):
            torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(2))
        moved = policy.logprobs(batch)  # with the experts that the batch has
        anew = policy.logprobs(batch.drop("experts"))
        assert not torch.equal(anew.jagged("experts").values, scored.jagged("experts").values)
        assert not torch.allclose(moved.jagged("old_logprobs").values, anew.jagged("old_logprobs").values)


def test_what_cannot_be_replayed_is_refused() -> None:
    batch, algorithm = recorded(), AlgorithmConfig(minibatches=2, options={"router_replay": "old"})
    with pytest.raises(ConfigError, match=r"options\.router_replay: Qwen3ForCausalLM is no mixture of experts"):
        Policy(replace(TINY, config=PLAIN), algorithm=algorithm)
    with pytest.raises(DataError, match="router_replay needs the column 'experts'; the batch has none"):
        Policy(MIXTURE, algorithm=algorithm).accumulate(batch)
    tokens = batch.jagged("tokens")
    odd = batch.with_columns({"experts": tokens.like(torch.zeros(len(tokens.values), 3, dtype=torch.int16))})
    with pytest.raises(DataError, match="experts has 3 columns; the model has 2 routers"):
        Policy(MIXTURE, OptimConfig(), algorithm=algorithm).accumulate(odd)
    for changes in ({}, {"minibatches": 2, "loss": "dppo_tv"}, {"epochs": 2, "correction": "bypass"}):
        with pytest.raises(ConfigError, match="router_replay = 'old': the policy computes no log-probabilities before"):
            check_functions(AlgorithmConfig(options={"router_replay": "old"}, **changes))
    with pytest.raises(ConfigError, match=r"algorithm\.options\.router_replay"):
        check_functions(AlgorithmConfig(options={"router_replay": "R3"}))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text"])
def test_replaying_what_a_model_chose_changes_no_bit(family: str) -> None:
    model = make(family)
    tokens = recorded((6,)).jagged("tokens")
    mask = torch.tensor([False, False, True, True, True, True])
    (micro,) = cut(Batch({"tokens": tokens, "loss_mask": tokens.like(mask)}), 100, packed=False)
    with torch.no_grad(), record_routes(model) as routes:
        before = model(input_ids=micro.input_ids).logits
    experts = torch.nn.functional.pad(torch.cat([route.experts for route in routes], -1), (0, 0, 0, 1))
    with torch.no_grad(), replay_routes(model, experts) as choose:
        choose(micro)
        after = model(input_ids=micro.input_ids).logits
    assert torch.equal(before, after)


def test_routers_that_do_not_choose_by_one_topk_are_refused() -> None:
    shape: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "pad_token_id": 0,
    }
    model: Any = PhimoeForCausalLM(PhimoeConfig(**shape, **heads)).eval()
    tokens = recorded((6,)).jagged("tokens")
    mask = torch.tensor([False, True, True, True, True, True])
    (micro,) = cut(Batch({"tokens": tokens, "loss_mask": tokens.like(mask)}), 100, packed=False)
    refusal = pytest.raises(ConfigError, match="router_replay: PhimoeTopKRouter does not choose by one topk")
    with refusal, replay_routes(model, torch.zeros(6, 2, dtype=torch.int16)) as choose:
        choose(micro)
        model(input_ids=micro.input_ids)


def test_a_pass_that_an_overflow_makes_again_replays_its_own_minibatch() -> None:
    batch = with_experts(recorded()).drop("old_logprobs")
    minibatches = batch, batch.take(list(range(len(batch)))[::-1])  # other tokens at other places
    results: list[tuple[Tensor, Tensor]] = []
    for scale in (2.0**8, 2.0**40):
        algorithm = AlgorithmConfig(options={"router_replay": "rollout"})
        policy = Policy(MIXTURE, OptimConfig(lr=0.0, grad_clip=0.0), ParallelConfig(precision="float16"), algorithm)
        policy.engine.loss_scale.value = scale
        for minibatch in minibatches:
            policy.accumulate(minibatch)
        assert policy.step()["policy/skipped_steps"] == 0.0
        assert policy.engine.loss_scale.value < 2.0**40
        gradients = torch.cat([part.flatten() for part in policy.engine.parallel.gradients()])
        results.append((gradients, policy.update_logprobs(minibatches[-1]).jagged("old_logprobs").values))
    (expected, old), (gradients, old_again) = results
    assert float((gradients - expected).norm() / expected.norm()) < 0.01
    assert torch.equal(old_again, old)
