"""Score centering against its formula in NumPy, and against the whole of what it estimates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from podium.algorithms import AlgorithmConfig, LossInputs, check_functions, policy_loss
from podium.errors import ConfigError, DataError

TOKENS, IDS = 6, 8
CORRECTIONS: dict[str, tuple[Any, Any]] = {
    "none": ({}, lambda ratio: np.ones_like(ratio)),
    "truncate": ({"correction": "truncate", "options": {"weight_cap": 1.3}}, lambda ratio: np.minimum(ratio, 1.3)),
    "icepop": (
        {"correction": "icepop", "options": {"icepop_low": 0.7, "icepop_high": 1.6}},
        lambda ratio: ratio * ((ratio >= 0.7) & (ratio <= 1.6)),
    ),
    "two_sided": (
        {"correction": ["truncate", "two_sided"], "options": {"weight_cap": 1.3, "ratio_low": 0.6}},
        lambda ratio: np.minimum(ratio, 1.3) * ((ratio >= 0.6) & (ratio <= 2.0)),
    ),
}


def oracle(p_NV: np.ndarray, q_NV: np.ndarray, head: int, weigh: Any) -> tuple[np.ndarray, np.ndarray]:
    """The paper's equations 7 to 12 by token and id: the slopes of the expected score by the logits, and the rest."""
    slopes_NV, rest_N = np.zeros_like(p_NV), np.zeros(len(p_NV))
    for n, (p_V, q_V) in enumerate(zip(p_NV, q_NV, strict=True)):
        top = np.argsort(-q_V)[:head]
        rest_p, rest_q = (max(1e-6, 1 - probs[top].sum()) for probs in (p_V, q_V))
        modeled_V = np.where(np.isin(np.arange(len(p_V)), top), q_V, rest_q / rest_p * p_V)
        mass_V = modeled_V * weigh(p_V / modeled_V)
        slopes_NV[n] = mass_V - mass_V.sum() * p_V  # of sum_v mass_v log p_v
        rest_N[n] = rest_q
    return slopes_NV, rest_N


def make(seed: int, head: int, options: dict[str, Any], apart: float = 1.0) -> tuple[Tensor, Tensor, LossInputs, Any]:
    """Logits of the policy with a gradient, log-probabilities of the generator, inputs and settings."""
    torch.manual_seed(seed)
    logits_NV = torch.randn(TOKENS, IDS, dtype=torch.float64, requires_grad=True)
    logq_NV = (logits_NV.detach() + apart * torch.randn(TOKENS, IDS, dtype=torch.float64)).log_softmax(-1)
    best, logp_NV, ids_N = logq_NV.topk(head), logits_NV.log_softmax(-1), torch.randint(IDS, (TOKENS,))
    columns = {
        "logprobs": logp_NV.gather(1, ids_N[:, None])[:, 0],
        "rollout_logprobs": logq_NV.gather(1, ids_N[:, None])[:, 0],
        "advantages": torch.randn(TOKENS, dtype=torch.float64),
        "rollout_top": torch.cat([best.values, best.indices.double()], 1),
        "at_rollout_top": logp_NV.gather(1, best.indices),
        "tokens": ids_N,
    }
    config = AlgorithmConfig(
        loss="reinforce",
        correction=options.get("correction", "none"),
        options={"score_centering": head, **options.get("options", {})},
    )
    check_functions(config)
    return logits_NV, logq_NV, LossInputs(offsets_B1=torch.tensor([0, 2, TOKENS]), columns=columns), config.resolve()


def slopes_of(logits_NV: Tensor, inputs: LossInputs, config: AlgorithmConfig) -> tuple[np.ndarray, dict[str, Tensor]]:
    loss = policy_loss(inputs, config)
    (slopes_NV,) = torch.autograd.grad(loss.loss_N.sum(), logits_NV, retain_graph=True)
    return slopes_NV.numpy(), dict(loss.metrics)


@pytest.mark.each_value
@pytest.mark.parametrize("head", [1, 3, IDS])
@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_the_expected_score_is_taken_off_with_the_advantage(name: str, head: int, seed: int) -> None:
    options, weigh = CORRECTIONS[name]
    logits_NV, logq_NV, inputs, config = make(seed, head, options)
    slopes_NV, metrics = slopes_of(logits_NV, inputs, config)
    plain = AlgorithmConfig(**{**vars(config), "options": {**config.options, "score_centering": 0}})
    before_NV, _ = slopes_of(logits_NV, inputs, plain)
    p_NV, q_NV = (logs.detach().softmax(-1).numpy() for logs in (logits_NV, logq_NV))
    expected_NV, rest_N = oracle(p_NV, q_NV, head, weigh)
    added_NV = inputs.advantages_N.numpy()[:, None] * expected_NV
    np.testing.assert_allclose(slopes_NV - before_NV, added_NV, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(metrics["mismatch/drift_rest"], rest_N, rtol=1e-6)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_update_that_the_generator_is_expected_to_give_is_nothing_for_equal_advantages(name: str) -> None:
    """The drift of the paper's equation 3, which plain losses have."""
    options, _ = CORRECTIONS[name]
    totals: list[np.ndarray] = []
    for centering in (IDS, 0):
        logits_NV, logq_NV, inputs, config = make(0, IDS, options)
        config = AlgorithmConfig(**{**vars(config), "options": {**config.options, "score_centering": centering}})
        total_NV = np.zeros((TOKENS, IDS))
        for sampled in range(IDS):
            logp_NV = logits_NV.log_softmax(-1)
            picked = {"logprobs": logp_NV[:, sampled], "rollout_logprobs": logq_NV[:, sampled]}
            columns = {**inputs.columns, **picked, "advantages": torch.ones(TOKENS, dtype=torch.float64)}
            slopes_NV, _ = slopes_of(logits_NV, LossInputs(offsets_B1=inputs.offsets_B1, columns=columns), config)
            total_NV += logq_NV[:, sampled].exp().numpy()[:, None] * slopes_NV
        totals.append(total_NV)
    np.testing.assert_allclose(totals[0], 0, atol=1e-5)
    assert np.abs(totals[1]).max() > 0.05


def test_nothing_is_added_where_generator_and_policy_agree() -> None:
    logits_NV, _, inputs, config = make(0, 4, {}, apart=0.0)
    slopes_NV, metrics = slopes_of(logits_NV, inputs, config)
    plain_NV, _ = slopes_of(logits_NV, inputs, AlgorithmConfig(loss="reinforce").resolve())
    np.testing.assert_allclose(slopes_NV, plain_NV, atol=1e-12)
    assert float(metrics["mismatch/drift"].max()) < 1e-12


def test_ids_that_could_not_be_drawn_add_nothing() -> None:
    """A constraint, or a vocabulary of fewer ids than are recorded, leaves places without probability."""
    logits_NV, _, inputs, config = make(1, 5, CORRECTIONS["truncate"][0])
    whole_NV, _ = slopes_of(logits_NV, inputs, config)
    values_NJ, ids_NJ = inputs.columns["rollout_top"].chunk(2, -1)
    never, zeros = torch.full((TOKENS, 2), -torch.inf, dtype=torch.float64), torch.zeros(TOKENS, 2).double()
    for missing in (-torch.inf, torch.finfo(torch.float64).min):
        columns = {
            **inputs.columns,
            "rollout_top": torch.cat([values_NJ, never, ids_NJ, zeros], -1),
            "at_rollout_top": torch.cat([inputs.columns["at_rollout_top"], torch.full_like(never, missing)], -1),
        }
        padded_NV, _ = slopes_of(logits_NV, LossInputs(offsets_B1=inputs.offsets_B1, columns=columns), config)
        np.testing.assert_allclose(padded_NV, whole_NV, rtol=1e-12)


def test_a_sum_of_losses_is_centered_where_the_advantage_is_a_factor() -> None:
    logits_NV, _, inputs, _ = make(2, 4, {})
    inputs = LossInputs(
        offsets_B1=inputs.offsets_B1,
        columns={**inputs.columns, "teacher_logprobs": inputs.rollout_logprobs_N},
    )
    added: list[np.ndarray] = []
    for loss in ("reinforce", {"reinforce": 0.5, "teacher_kl": 2.0}):
        slopes = [
            slopes_of(
                logits_NV,
                inputs,
                AlgorithmConfig(loss=loss, options={"teacher": "there", "score_centering": head}).resolve(),
            )[0]
            for head in (4, 0)
        ]
        added.append(slopes[0] - slopes[1])
    np.testing.assert_allclose(added[1], 0.5 * added[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"minibatches": 2}, "minibatches = 2: the ratios of later optimizer steps are not centered"),
        ({"epochs": 2}, "epochs = 2"),
        ({"loss": "dppo_tv"}, "loss = 'dppo_tv'.*needs no centering"),
        ({"loss": "teacher_kl"}, "a loss of which the advantage is a factor"),
        ({"correction": "bypass"}, "correction = 'bypass'"),
        ({"correction": ["truncate", "geometric"]}, "correction = 'geometric': the weight of a token that was not"),
        ({"correction": "m2po"}, "truncate, icepop, two_sided alone"),
    ],
)
def test_what_cannot_be_centered_is_refused(changes: dict[str, Any], why: str) -> None:
    options = {"score_centering": 20, **({"teacher": "there"} if changes.get("loss") == "teacher_kl" else {})}
    with pytest.raises(ConfigError, match=rf"algorithm\.options\.score_centering = 20 with .*{why}"):
        check_functions(AlgorithmConfig(options=options, **changes))


def test_a_batch_without_the_probable_tokens_is_refused() -> None:
    _, _, inputs, config = make(0, 4, {})
    columns = {name: column for name, column in inputs.columns.items() if "top" not in name}
    with pytest.raises(DataError, match="needs the column 'rollout_top', because"):
        policy_loss(LossInputs(offsets_B1=inputs.offsets_B1, columns=columns), config)
