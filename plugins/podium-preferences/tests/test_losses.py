"""Losses of preferences: those of the papers, and a gradient that does not depend on how answers share batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from podium.algorithms import AlgorithmConfig
from podium.data import Batch, Jagged
from podium.data.sampled_text import count_sampled
from podium.errors import ConfigError, DataError
from podium.training import OptimConfig, ParallelConfig
from podium.workers import Policy
from podium_preferences.config import PREFERENCE_LOSSES, PreferenceConfig, ScorerConfig
from podium_preferences.objective import (
    PreferenceInputs,
    differentiate,
    explain_options,
    read_preference_options,
    weigh_tokens,
)
from podium_preferences.scorer import Scorer
from tests.unit.workers.tiny import TINY, recorded

Array = Any


def log_sigmoid(x: Array) -> Array:
    return -np.log1p(np.exp(-x))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def pairs(seed: int = 0, count: int = 5) -> PreferenceInputs:
    """Pairs of answers, the better one first."""
    rng = np.random.default_rng(seed)
    return PreferenceInputs(
        values_A=torch.from_numpy(-10 * rng.random(2 * count)),
        chosen_A=torch.tensor([True, False] * count),
        reference_A=torch.from_numpy(-10 * rng.random(2 * count)),
        lengths_A=torch.from_numpy(rng.integers(1, 9, 2 * count)),
        margins_P=torch.from_numpy(rng.random(count)),
        mismatched_M=torch.from_numpy(rng.normal(2 * (seed - 1), 1, 3)),
    )


def columns_of(inputs: PreferenceInputs) -> tuple[Array, Array, Array, Array, Array, Array, Array]:
    """Values, values under the reference and lengths of better and of worse answers, and margins."""
    assert inputs.reference_A is not None and inputs.lengths_A is not None and inputs.margins_P is not None
    columns = (inputs.values_A, inputs.reference_A, inputs.lengths_A)
    (a, b), (c, d), (e, f) = ((column[::2].numpy(), column[1::2].numpy()) for column in columns)
    return a, b, c, d, e, f, inputs.margins_P.numpy()


# Each returns the loss of each pair, and its derivatives by the values of the better and of the worse answer.


def dpo(inputs: PreferenceInputs, beta: float, noise: float) -> tuple[Array, Array, Array]:
    w, l, ref_w, ref_l, *_ = columns_of(inputs)  # noqa: E741 - the paper's name of the losing answer
    h = beta * ((w - ref_w) - (l - ref_l))
    slope = beta * (-(1 - noise) * sigmoid(-h) + noise * sigmoid(h))
    return -(1 - noise) * log_sigmoid(h) - noise * log_sigmoid(-h), slope, -slope


def bradley_terry(inputs: PreferenceInputs, center: float) -> tuple[Array, Array, Array]:
    w, l, *_, margin = columns_of(inputs)  # noqa: E741 - the paper's name of the losing answer
    slope, pull = -sigmoid(-(w - l - margin)), 2 * center * (w + l)
    return -log_sigmoid(w - l - margin) + center * (w + l) ** 2, slope + pull, -slope + pull


def ipo(inputs: PreferenceInputs, beta: float, average: bool) -> tuple[Array, Array, Array]:
    w, l, ref_w, ref_l, n_w, n_l, _ = columns_of(inputs)  # noqa: E741 - the paper's name of the losing answer
    n_w, n_l = (n_w, n_l) if average else (1, 1)
    away = (w - ref_w) / n_w - (l - ref_l) / n_l - 1 / (2 * beta)
    return away**2, 2 * away / n_w, -2 * away / n_l


def orpo(inputs: PreferenceInputs, beta: float) -> tuple[Array, Array, Array]:
    w, l, _, _, n_w, n_l, _ = columns_of(inputs)  # noqa: E741 - the paper's name of the losing answer
    p_w, p_l = np.exp(w / n_w), np.exp(l / n_l)
    ratio = np.log(p_w / (1 - p_w)) - np.log(p_l / (1 - p_l))
    slope = beta * sigmoid(-ratio)  # and d log(p / (1 - p)) / d log p = 1 / (1 - p)
    return -w / n_w - beta * log_sigmoid(ratio), (-1 - slope / (1 - p_w)) / n_w, slope / (1 - p_l) / n_l


def simpo(inputs: PreferenceInputs, beta: float, gamma: float) -> tuple[Array, Array, Array]:
    w, l, _, _, n_w, n_l, _ = columns_of(inputs)  # noqa: E741 - the paper's name of the losing answer
    margin = beta / n_w * w - beta / n_l * l - gamma
    return -log_sigmoid(margin), -beta / n_w * sigmoid(-margin), beta / n_l * sigmoid(-margin)


def kto(inputs: PreferenceInputs, beta: float, desirable: float, undesirable: float) -> tuple[Array, Array, Array]:
    w, l, ref_w, ref_l, *_ = columns_of(inputs)  # noqa: E741 - the paper's name of the losing answer
    assert inputs.mismatched_M is not None
    z = max(0.0, float(inputs.mismatched_M.numpy().mean()))
    v_w, v_l = sigmoid(beta * (w - ref_w - z)), sigmoid(beta * (z - (l - ref_l)))
    losses = np.stack([desirable * (1 - v_w), undesirable * (1 - v_l)], axis=1).flatten()
    return losses, -desirable * beta * v_w * (1 - v_w), undesirable * beta * v_l * (1 - v_l)


CASES: list[tuple[str, dict[str, float], Callable[..., tuple[Array, Array, Array]]]] = [
    ("dpo", {"beta": 0.3, "label_smoothing": 0.0}, dpo),
    ("dpo", {"beta": 0.3, "label_smoothing": 0.2}, dpo),
    ("ipo", {"beta": 0.3, "average": True}, ipo),
    ("ipo", {"beta": 0.3, "average": False}, ipo),
    ("kto", {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.8}, kto),
    ("orpo", {"beta": 0.3}, orpo),
    ("simpo", {"beta": 2.5, "gamma": 0.7}, simpo),
    ("bradley_terry", {"center": 0.0}, bradley_terry),
    ("bradley_terry", {"center": 0.01}, bradley_terry),
]


def config_of(name: str, options: dict[str, Any]) -> ScorerConfig:
    settings: dict[str, Any] = {"options": options, "loss": name}
    return ScorerConfig(options=options) if name == "bradley_terry" else PreferenceConfig(**settings)


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "options", "oracle"), CASES, ids=lambda case: getattr(case, "__name__", str(case)[:30])
)
def test_a_loss_of_pairs_and_its_derivatives_are_the_papers(
    name: str, options: dict[str, float], oracle: Callable[..., tuple[Array, Array, Array]], seed: int
) -> None:
    inputs = pairs(seed)
    loss, derivatives_A = differentiate(config_of(name, options), inputs)
    losses, of_chosen, of_rejected = oracle(inputs, *options.values())
    np.testing.assert_allclose(loss.losses.numpy(), losses, atol=1e-9)
    np.testing.assert_allclose(derivatives_A[::2].numpy(), of_chosen / len(losses), atol=1e-9)
    np.testing.assert_allclose(derivatives_A[1::2].numpy(), of_rejected / len(losses), atol=1e-9)


def test_every_loss_has_an_oracle() -> None:
    assert {name for name, *_ in CASES} == {*PREFERENCE_LOSSES}


def test_options_are_those_of_the_loss_with_the_papers_values_as_defaults() -> None:
    assert {name: value for name, (value, _) in explain_options(PreferenceConfig()).items()} == {
        "beta": 0.1,
        "label_smoothing": 0.0,
    }
    explained = explain_options(PreferenceConfig(options={"beta": 0.5}))
    assert explained["beta"] == (0.5, "yours")
    assert explained["label_smoothing"].origin.startswith("default of the loss dpo: Rafailov et al. 2023")
    with pytest.raises(ConfigError, match=r"algorithm\.options\.bta .*did you mean beta"):
        read_preference_options(PreferenceConfig(options={"bta": 0.5}))
    with pytest.raises(ConfigError, match=r"algorithm\.options\.label_smoothing = 0\.5"):
        read_preference_options(PreferenceConfig(options={"label_smoothing": 0.5}))


def test_a_loss_without_its_reference_is_refused() -> None:
    with pytest.raises(DataError, match="compares the policy with a reference"):
        differentiate(
            PreferenceConfig(), PreferenceInputs(values_A=torch.zeros(2), chosen_A=torch.tensor([True, False]))
        )


# -- the gradient of a model -----------------------------------------------------------------------------------------


def direct_gradient(batch: Batch, config: ScorerConfig, references_A: torch.Tensor) -> torch.Tensor:
    """The gradient of the loss, computed row by row with all rows in one graph, and no other code of Podium."""
    model = Policy(TINY).model
    sums: list[torch.Tensor] = []
    for row, mask in zip(batch.jagged("tokens").unbind(), batch.jagged("loss_mask").unbind(), strict=True):
        logprobs = torch.log_softmax(model(row[None]).logits[0, :-1].double(), -1)
        sums.append(logprobs.gather(1, row[1:, None])[:, 0][mask[1:]].sum())
    beta = read_preference_options(config).beta
    ratios = torch.stack(sums) - references_A
    (-torch.nn.functional.logsigmoid(beta * (ratios[::2] - ratios[1::2]))).mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.each_value
@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("micro_batch_tokens", [8, 40, 1000])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6, 7], [5, 0, 3, 6, 2, 7, 1, 4]])
def test_the_gradient_is_exact_for_any_cut_and_any_order_of_rows(
    batching: Any, micro_batch_tokens: int, order: list[int]
) -> None:
    """The rows of a pair may be in different micro-batches: those of 8 tokens hold one row each."""
    batch, config = recorded().select("tokens", "loss_mask"), PreferenceConfig(options={"beta": 0.3})
    references_A = torch.linspace(-40, -5, len(batch)).double()
    expected = direct_gradient(batch, config, references_A)
    parallel = ParallelConfig(micro_batch_tokens=micro_batch_tokens, batching=batching)
    optim = OptimConfig(lr=1e-3, grad_clip=0.0)
    policy = Policy(TINY, optim, parallel, AlgorithmConfig(loss="cross_entropy"))
    shuffled = batch.take(order)
    values_A = policy.answer_values(shuffled).dense("answer_values")[torch.tensor(order).argsort()]
    inputs = PreferenceInputs(
        values_A=values_A,
        chosen_A=torch.tensor([True, False] * 4),
        reference_A=references_A,
        lengths_A=count_sampled(batch.jagged("loss_mask")),
    )
    _, derivatives_A = differentiate(config, inputs)
    weights = weigh_tokens(-derivatives_A[order], shuffled.jagged("loss_mask"))
    policy.accumulate(shuffled.with_columns({"loss_weights": weights}))
    gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])
    assert gradient.abs().max() > 1e-2
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)


def scores_of(scorer: Scorer, batch: Batch) -> torch.Tensor:
    """The score after each row's last token, row by row in one graph."""
    model: Any = scorer.model
    rows = batch.jagged("tokens").unbind()
    return torch.cat([model.model(row[None]).last_hidden_state[:, -1] @ model.lm_head.weight.T for row in rows])[:, 0]


@pytest.mark.each_value
@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("micro_batch_tokens", [8, 1000])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6, 7], [5, 0, 3, 6, 2, 7, 1, 4]])
def test_the_gradient_of_a_reward_model_is_exact_for_any_cut_and_any_order(
    batching: Any, micro_batch_tokens: int, order: list[int]
) -> None:
    batch, config = recorded().select("tokens", "loss_mask"), ScorerConfig(options={"center": 0.1})

    def make(parallel: ParallelConfig | None = None) -> Scorer:
        scorer = Scorer(TINY, OptimConfig(lr=0.0, grad_clip=0.0), parallel)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():  # the head starts at 0, and the body would have no gradient
            head: Any = scorer.model.lm_head
            head.weight.copy_(torch.randn(1, 32, generator=generator) / 10)
        return scorer

    direct = make()
    scores_A = scores_of(direct, batch)
    margins_P = scores_A[::2] - scores_A[1::2]
    squares_P = (scores_A[::2] + scores_A[1::2]).square()
    (-torch.nn.functional.logsigmoid(margins_P) + 0.1 * squares_P).mean().backward()
    expected = torch.cat([p.grad.flatten() for p in direct.model.parameters() if p.grad is not None])
    scorer = make(ParallelConfig(micro_batch_tokens=micro_batch_tokens, batching=batching))
    shuffled = batch.take(order)
    values_A = scorer.answer_values(shuffled).dense("answer_values")[torch.tensor(order).argsort()]
    torch.testing.assert_close(values_A, scores_A.detach().double(), atol=1e-5, rtol=0)
    inputs = PreferenceInputs(values_A=values_A, chosen_A=torch.tensor([True, False] * 4))
    _, derivatives_A = differentiate(config, inputs)
    weights = weigh_tokens(-derivatives_A[order], shuffled.jagged("loss_mask"))
    scorer.update(shuffled.with_columns({"loss_weights": last_alone(weights)}))
    gradient = torch.cat([p.grad.flatten() for p in scorer.model.parameters() if p.grad is not None])
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)


def test_a_reward_model_may_read_in_both_directions_since_it_scores_whole_texts() -> None:
    shape = {**TINY.config, "model_type": "gemma3_text", "use_bidirectional_attention": True}
    model, batch = replace(TINY, config=shape), recorded().select("tokens")
    with pytest.raises(ConfigError, match="set use_bidirectional_attention to false"):
        Policy(model)
    scorer = Scorer(model)
    with torch.no_grad():
        cast(Any, scorer.model).lm_head.weight.normal_()
    scores_A = scorer.answer_values(batch).dense("answer_values")
    torch.testing.assert_close(scores_A, scores_of(scorer, batch).detach().double(), atol=1e-5, rtol=0)


def last_alone(weights: Jagged) -> Jagged:
    """The weight of each row at its last token, which a trainer's mask alone has."""
    values = torch.zeros_like(weights.values)
    values[weights.offsets[1:] - 1] = weights.values[weights.offsets[1:] - 1]
    return weights.like(values)
