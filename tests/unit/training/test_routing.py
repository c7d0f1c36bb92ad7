"""The auxiliary loss of a mixture of experts is that of the formula, in its value and its gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from podium.algorithms import AlgorithmConfig
from podium.data import Batch
from podium.errors import ConfigError, DataError
from podium.models import load_model
from podium.training import OptimConfig, ParallelConfig
from podium.training.routing import Route, count_choices, measure_balance, record_routes
from podium.workers import Policy
from tests.unit.training.families import make
from tests.unit.workers.tiny import SHAPE, TINY, recorded

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PLAIN = {name: value for name, value in SHAPE.items() if name != "head_dim"}
MIXTURE = replace(TINY, config={**PLAIN, **EXPERTS})
BALANCE = 3.0


def even(p_TE: np.ndarray, f_E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Switch Transformers, equations 4 to 6, at each token: E sum f p, and its slope by the logits of p."""
    value_T = len(f_E) * (p_TE @ f_E)
    return value_T, p_TE * (len(f_E) * f_E - value_T[:, None])


@pytest.mark.parametrize("seed", range(3))
def test_the_balance_of_tokens_is_that_of_switch_transformers(seed: int) -> None:
    rng, places = np.random.default_rng(seed), torch.tensor([1, 4, 4, 9])
    logits = [torch.from_numpy(rng.normal(size=(12, 5))).requires_grad_() for _ in range(3)]
    routes = [Route(layer, layer.topk(2, -1).indices) for layer in logits]
    counts_LE = count_choices(routes, places)
    assert counts_LE.sum(-1).tolist() == [8.0, 8.0, 8.0]
    balance_K = measure_balance(routes, places, counts_LE / 8)
    expected_K, pull = np.zeros(4), np.array([1.0, -2.0, 0.5, 3.0])
    (balance_K * torch.from_numpy(pull)).sum().backward()
    for layer, counts_E in zip(logits, counts_LE.numpy(), strict=True):
        p_TE = np.exp(layer.detach().numpy()[places]) / np.exp(layer.detach().numpy()[places]).sum(1, keepdims=True)
        value_K, slope_KE = even(p_TE, counts_E / 8)
        expected_K += value_K / 3
        slopes = np.zeros((12, 5))
        np.add.at(slopes, places.numpy(), pull[:, None] * slope_KE / 3)
        assert layer.grad is not None
        np.testing.assert_allclose(layer.grad, slopes, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(balance_K.detach(), expected_K, rtol=1e-6)
    routes = [Route(torch.zeros(12, 5), torch.arange(12)[:, None] % 5)]
    assert measure_balance(routes, places, torch.full((1, 5), 0.2)).tolist() == pytest.approx([1.0] * 4)


def gradient_of(balance: float, batch: Batch, **parallel: Any) -> tuple[dict[str, float], list[torch.Tensor]]:
    options = {"router_balance": balance} if balance else {}
    optim = OptimConfig(lr=1e-3, grad_clip=0.0)
    policy = Policy(MIXTURE, optim, ParallelConfig(**parallel), AlgorithmConfig(options=options))
    row = policy.accumulate(batch)
    return row, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in policy.model.parameters()]


@pytest.mark.parametrize("lengths", [(5, 9, 30, 2, 17, 12, 23, 3), None], ids=["rows", "shared prompts"])
def test_a_policy_adds_the_auxiliary_loss_of_the_whole_minibatch(lengths: tuple[int, ...] | None) -> None:
    """However micro-batches cut it, and rows are in which order: by a pass over each row alone."""
    batch = recorded(lengths)
    plain = gradient_of(0.0, batch)
    added = {
        name: gradient_of(BALANCE, rows, **parallel)
        for name, rows, parallel in (
            ("whole", batch, {"micro_batch_tokens": 1000}),
            ("cut", batch, {"micro_batch_tokens": 40}),
            ("packed", batch, {"batching": "packed"}),
            ("turned", batch.take(list(range(len(batch)))[::-1]), {}),
        )
    }
    model = load_model(MIXTURE)
    rows = [batch.jagged(name).unbind() for name in ("tokens", "loss_mask", "loss_weights")]
    weights, probs, chosen = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for tokens, mask, weight in zip(*rows, strict=True):
        with record_routes(model) as routes:
            model(input_ids=tokens[None])
        places = mask.bool().nonzero()[:, 0] - 1
        weights.append(weight[mask.bool()].double())
        probs.append(torch.stack([route.logits[places].softmax(-1) for route in routes], 1))
        chosen.append(torch.stack([route.experts[places] for route in routes], 1))
    shares_LE = torch.nn.functional.one_hot(torch.cat(chosen), 4).double().sum((0, 2))
    shares_LE /= shares_LE.sum(-1, keepdim=True)
    loss = (torch.cat(weights) * 4 * (torch.cat(probs) * shares_LE).sum(-1).mean(-1)).sum()
    expected = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    for name, (row, gradients) in added.items():
        assert row["loss"] - plain[0]["loss"] == pytest.approx(BALANCE * float(loss.detach()), rel=1e-5), name
        assert row["policy/router_balance"] >= 1
        for before, after, right in zip(plain[1], gradients, expected, strict=True):
            right = torch.zeros_like(after) if right is None else BALANCE * right.float()
            torch.testing.assert_close(after - before, right, rtol=1e-3, atol=2e-5)


def test_a_note_tells_of_an_auxiliary_loss_that_the_configuration_asks_for_and_that_is_not_trained() -> None:
    asking = replace(MIXTURE, config={**MIXTURE.config, "output_router_logits": True})
    sentence, balanced = "output_router_logits = true", AlgorithmConfig(options={"router_balance": 0.01})
    assert Policy(asking, OptimConfig()).note().startswith(sentence)
    assert Policy(asking, OptimConfig(), algorithm=AlgorithmConfig(loss="cross_entropy")).note().startswith(sentence)
    for silent in (Policy(asking), Policy(MIXTURE, OptimConfig()), Policy(asking, OptimConfig(), algorithm=balanced)):
        assert silent.note() == ""


def test_a_model_without_such_routers_is_refused() -> None:
    for shape in ({}, {"model_type": "granite"}):
        with pytest.raises(ConfigError, match=r"router_balance: \w+ is no mixture of experts"):
            Policy(replace(TINY, config={**PLAIN, **shape}), algorithm=AlgorithmConfig(options={"router_balance": 0.1}))
    with pytest.raises(ConfigError, match=r"unknown key algorithm\.options\.router_balanc"):
        Policy(MIXTURE, algorithm=AlgorithmConfig(options={"router_balanc": 0.1}))


def test_a_loss_without_the_column_says_which_option_needs_it() -> None:
    from podium.algorithms import LossInputs, policy_loss

    columns = {name: torch.zeros(2) for name in ("logprobs", "advantages")}
    with pytest.raises(DataError, match="needs the column 'router_balance', because"):
        policy_loss(
            LossInputs(offsets_B1=torch.tensor([0, 2]), columns=columns),
            AlgorithmConfig(options={"router_balance": 0.1}).resolve(),
        )


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text"])
def test_routers_of_families_are_recorded_in_each_layer(family: str) -> None:
    model = make(family)
    with record_routes(model) as routes:
        model(input_ids=torch.arange(4, 10)[None])
    assert routes and all(len(route.logits) == len(route.experts) == 6 for route in routes)
