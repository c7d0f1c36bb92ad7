"""Each loss of a paper against its formula in NumPy, forward and gradient, and what must not change it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from podium.algorithms import LOSSES, AlgorithmConfig, LossInputs, TokenLoss, check_functions, policy_loss
from podium.errors import ConfigError, DataError
from tests.unit.algorithms import loss_oracles, oracles
from tests.unit.algorithms.oracles import LossRow

SEEDS = range(5)


def draw(count: int) -> list[int]:
    """The order in which the code draws among places in the first optimizer step."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()


CASES: dict[str, tuple[dict[str, Any], Callable[[list[LossRow]], loss_oracles.Losses]]] = {
    "ppo_clip": ({"clip_low": 0.1, "clip_high": 0.2}, lambda rows: oracles.ppo_clip(rows, 0.1, 0.2)),
    "gspo": ({"clip_low": 0.02, "clip_high": 0.03}, lambda rows: oracles.gspo(rows, 0.02, 0.03)),
    "gmpo": ({"clip_low": 0.1, "clip_high": 0.2}, lambda rows: loss_oracles.gmpo(rows, 0.1, 0.2)),
    "cispo": ({"clip_low": 0.2, "clip_high": 0.1}, lambda rows: loss_oracles.cispo(rows, 0.2, 0.1)),
    "sapo": ({"options": {"tau_pos": 2.0, "tau_neg": 3.0}}, lambda rows: loss_oracles.sapo(rows, 2.0, 3.0)),
    "dppo_tv": ({"clip_low": 0.02, "clip_high": 0.03}, lambda rows: loss_oracles.dppo(rows, 0.02, 0.03, "tv")),
    "dppo_kl": ({"clip_low": 0.01, "clip_high": 0.02}, lambda rows: loss_oracles.dppo(rows, 0.01, 0.02, "kl")),
    "clip_cov": (
        {"clip_low": 0.1, "clip_high": 0.2, "options": {"cov_share": 0.2, "cov_low": 0.0, "cov_high": 0.5}},
        lambda rows: oracles.clip_cov(rows, 0.2, 0.0, 0.5, draw, clip=(0.1, 0.2)),
    ),
    "kl_cov": (
        {"options": {"kl_cov_share": 0.2, "kl_cov_coef": 0.7}},
        lambda rows: loss_oracles.kl_cov(rows, 0.2, 0.7),
    ),
    "dro": ({"options": {"dro_beta": 0.3}}, lambda rows: loss_oracles.dro(rows, 0.3)),
    "reinforce": ({}, loss_oracles.reinforce),
    "teacher_kl": ({"options": {"teacher": "there"}}, loss_oracles.teacher_kl),
}
DEFAULTS: dict[str, Callable[[list[LossRow]], loss_oracles.Losses]] = {  # the figures of the papers, once more
    "gmpo": lambda rows: loss_oracles.gmpo(rows, 0.4, 0.4),
    "cispo": lambda rows: loss_oracles.cispo(rows, 1.0, 4.0),
    "sapo": lambda rows: loss_oracles.sapo(rows, 1.0, 1.05),
    "dppo_tv": lambda rows: loss_oracles.dppo(rows, 0.15, 0.15, "tv"),
    "dppo_kl": lambda rows: loss_oracles.dppo(rows, 0.05, 0.05, "kl"),
    "kl_cov": lambda rows: loss_oracles.kl_cov(rows, 2e-4, 1.0),
    "dro": lambda rows: loss_oracles.dro(rows, 0.05),
}


def random_rows(seed: int, rows: int = 8) -> list[LossRow]:
    """Rows of 1 to 7 tokens with an advantage each; some have none."""
    rng = np.random.default_rng(seed)
    made: list[LossRow] = []
    for _ in range(rows):
        length = int(rng.integers(1, 8))
        logprobs = -rng.exponential(size=length) - 0.05
        old = np.minimum(logprobs + rng.normal(size=length) / 4, -0.01)
        made.append(LossRow(logprobs, old, np.full(length, float(rng.choice([-1.5, -0.5, 0.0, 0.5, 2.0])))))
    return made


SCALED = sorted(name for name in LOSSES if LOSSES.declaration(name).scales_advantage)


def to_inputs(rows: list[LossRow], config: AlgorithmConfig, step: int = 0) -> LossInputs:
    """The flat layout, with the figures of the whole minibatch. The generator is the old policy."""
    columns = {
        "logprobs": torch.from_numpy(np.concatenate([row.logprobs for row in rows])).requires_grad_(),
        "old_logprobs": torch.from_numpy(np.concatenate([row.old for row in rows])),
        "advantages": torch.from_numpy(np.concatenate([row.advantages for row in rows])),
        "teacher_logprobs": torch.from_numpy(np.concatenate([row.teacher for row in rows])),
    }
    columns["rollout_logprobs"] = columns["old_logprobs"]
    offsets = torch.tensor([0, *np.cumsum([len(row.logprobs) for row in rows]).tolist()])
    inputs = LossInputs(offsets_B1=offsets, columns=columns, step=step)
    (name,) = config.losses
    minibatch = LOSSES.declaration(name).load_minibatch()
    with torch.no_grad():
        return inputs if minibatch is None else replace(inputs, figures=minibatch(inputs, config.resolve()))


def evaluate(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor, TokenLoss]:
    loss = policy_loss(inputs, config.resolve())
    (gradient,) = torch.autograd.grad(loss.loss_N.sum(), inputs.columns["logprobs"])
    return loss.loss_N.detach(), gradient, loss


def part_of(inputs: LossInputs, rows: slice) -> LossInputs:
    """A micro-batch of some rows, with their figures."""
    ends = inputs.offsets_B1[rows.start : rows.stop + 1]
    tokens = slice(int(ends[0]), int(ends[-1]))
    columns = {name: column[tokens].detach() for name, column in inputs.columns.items()}
    columns["logprobs"].requires_grad_()
    figures = {name: column[tokens] for name, column in inputs.figures.items()}
    return LossInputs(offsets_B1=ends - ends[0], columns=columns, figures=figures, step=inputs.step)


def test_each_loss_of_reinforcement_has_a_formula_here() -> None:
    assert CASES.keys() == {*LOSSES} - {"cross_entropy"}


@pytest.mark.each_value
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_formula(name: str, seed: int) -> None:
    settings, oracle = CASES[name]
    rows, config = random_rows(seed), AlgorithmConfig(loss=name, **settings)
    check_functions(config)
    losses_N, gradient_N, loss = evaluate(to_inputs(rows, config), config)
    expected, slopes = oracle(rows)
    np.testing.assert_allclose(losses_N, np.concatenate(expected), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient_N, np.concatenate(slopes), rtol=1e-9, atol=1e-12)
    share = {"kl_cov": "policy/cov_fraction"}.get(
        name, "policy/clip_fraction" if LOSSES.declaration(name).reads else ""
    )
    assert not share or 0 < float(loss.metrics[share].mean()) < 1  # both sides of what the loss decides take part


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mapping_of_losses_is_their_sum_with_weights(seed: int) -> None:
    """Each reads its own policy as the one before the update, and is reported under its name."""
    rows, weights = random_rows(seed), {"ppo_clip": 0.5, "teacher_kl": 2.0, "dppo_tv": 0.25, "reinforce": 0.0}
    config = AlgorithmConfig(loss=weights, clip_low=0.1, clip_high=0.2, options={"teacher": "there"})
    check_functions(config)
    inputs = to_inputs(rows, AlgorithmConfig())
    inputs = replace(inputs, columns={**inputs.columns, "rollout_logprobs": inputs.old_logprobs_N - 0.03})
    losses_N, gradient_N, loss = evaluate(inputs, config)
    shifted = [replace(row, old=row.old - 0.03) for row in rows]
    parts = {
        "ppo_clip": oracles.ppo_clip(rows, 0.1, 0.2),
        "teacher_kl": loss_oracles.teacher_kl(rows),
        "dppo_tv": loss_oracles.dppo(shifted, 0.1, 0.2, "tv"),
        "reinforce": loss_oracles.reinforce(rows),
    }
    for at, values_N in ((0, losses_N), (1, gradient_N)):
        expected = sum(weights[name] * np.concatenate(part[at]) for name, part in parts.items())
        np.testing.assert_allclose(values_N, expected, rtol=1e-9, atol=1e-12)
    for name, (part, _) in parts.items():
        np.testing.assert_allclose(loss.metrics[f"loss/{name}"], np.concatenate(part), rtol=1e-9, atol=1e-12)
    assert {"policy/clip_fraction", "policy/clip_fraction/dppo_tv"} <= loss.metrics.keys()


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_are_the_figures_of_the_paper(name: str) -> None:
    rows, config = random_rows(7, rows=40), AlgorithmConfig(loss=name)
    losses_N, gradient_N, _ = evaluate(to_inputs(rows, config), config)
    expected, slopes = DEFAULTS[name](rows)
    np.testing.assert_allclose(losses_N, np.concatenate(expected), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient_N, np.concatenate(slopes), rtol=1e-9, atol=1e-12)
    assert LOSSES.declaration(name).source
    origins = {**config.explain(), **config.explain_options()}
    told = {key for key, setting in origins.items() if setting.origin.startswith(f"default of the loss {name}: ")}
    declared = LOSSES.declaration(name)
    assert told >= declared.defaults.keys()
    assert declared.options is None or any(key.startswith("options.") for key in told)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_copy_of_a_loss_in_a_file_declares_what_podium_knows_of_its_own(name: str, tmp_path: Path) -> None:
    module, _, function = LOSSES.declaration(name).function.partition(":")
    (tmp_path / "mine.py").write_text(Path(str(importlib.import_module(module).__file__)).read_text())
    copy = f"{tmp_path}/mine.py:{function}"
    assert LOSSES.declaration(copy) == LOSSES.declaration(name)


@pytest.mark.parametrize("name", SCALED)
def test_without_advantages_nothing_is_learned(name: str) -> None:
    config = AlgorithmConfig(loss=name, **CASES[name][0])
    rows = [replace(row, advantages=0.0 * row.advantages) for row in random_rows(3)]
    losses_N, gradient_N, _ = evaluate(to_inputs(rows, config), config)
    assert not losses_N.any()
    assert not gradient_N.any()


@pytest.mark.parametrize("name", [*SCALED, "dro", "kl_cov"])
def test_the_first_update_follows_the_policy_gradient(name: str) -> None:
    """Where the policy has not moved, no ratio is clipped, and the gradient of each token is minus its advantage."""
    config = AlgorithmConfig(loss=name, options={"cov_low": 1e8, "cov_high": 1e9} if name == "clip_cov" else {})
    rows = [replace(row, old=row.logprobs) for row in random_rows(4)]
    _, gradient_N, _ = evaluate(to_inputs(rows, config), config)
    expected = -np.concatenate([row.advantages for row in rows])
    np.testing.assert_allclose(gradient_N, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "name", sorted({*LOSSES} - {"cross_entropy", "cispo", "reinforce", "dro", "dppo_tv", "dppo_kl", "teacher_kl"})
)
def test_only_ratios_count(name: str) -> None:
    """The same offset of new and old log-probabilities leaves ratios, and covariances, as they are."""
    settings, _ = CASES[name]
    rows, config = random_rows(5), AlgorithmConfig(loss=name, **settings)
    moved = [replace(row, logprobs=row.logprobs - 3.0, old=row.old - 3.0) for row in rows]
    first, second = (evaluate(to_inputs(some, config), config) for some in (rows, moved))
    torch.testing.assert_close(first[0], second[0])
    torch.testing.assert_close(first[1], second[1])


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "dro"])
def test_a_ratio_to_the_generator_takes_no_importance_weights(name: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.loss = '{name}', whose ratio is to the generator already"):
        check_functions(AlgorithmConfig(loss=name, correction="truncate"))
    rows, config = random_rows(6), AlgorithmConfig(loss=name)
    inputs = to_inputs(rows, config)
    apart = replace(inputs, columns={**inputs.columns, "old_logprobs": inputs.columns["old_logprobs"] - 1.0})
    loss = policy_loss(apart, config.resolve())
    torch.testing.assert_close(loss.loss_N, policy_loss(inputs, config.resolve()).loss_N)
    ratio_N = (inputs.logprobs_N - inputs.rollout_logprobs_N).exp()
    torch.testing.assert_close(loss.metrics["policy/ratio_mean"], ratio_N.detach())
    torch.testing.assert_close(loss.metrics["mismatch/mean"], torch.ones_like(ratio_N))  # of the old policy, still


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
@pytest.mark.parametrize("top", [1, 3, 7])
def test_the_divergence_from_a_teacher_over_its_most_probable_ids(divergence: str, top: int) -> None:
    """GKD's divergence, whose gradient by the policy's logits is that of the formula; with all ids it is the whole."""
    rng = np.random.default_rng(top)
    logits_NV, taught_NV = (torch.from_numpy(rng.normal(size=(20, 7)) * 2) for _ in range(2))
    logits_NV.requires_grad_()
    best = taught_NV.log_softmax(-1).topk(top, -1)
    log_p = logits_NV.log_softmax(-1)
    columns = {
        "logprobs": log_p[:, 0],
        "teacher_logprobs": taught_NV.log_softmax(-1)[:, 0],
        "teacher_top": torch.cat([best.values, best.indices.double()], 1),
        "at_teacher_top": log_p.gather(1, best.indices),
    }
    options = {"teacher": "there", "teacher_top_k": top, "teacher_divergence": divergence}
    config = AlgorithmConfig(loss="teacher_kl", options=options)
    check_functions(config)
    loss = policy_loss(LossInputs(offsets_B1=torch.tensor([0, 8, 20]), columns=columns), config.resolve())
    (slopes_NV,) = torch.autograd.grad(loss.loss_N.sum(), logits_NV)
    expected_N, expected_NV = loss_oracles.teacher_top(
        logits_NV.detach().numpy(), taught_NV.numpy(), top, forward=divergence == "forward"
    )
    np.testing.assert_allclose(loss.loss_N.detach(), expected_N, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(slopes_NV, expected_NV, rtol=1e-6, atol=1e-6)
    with pytest.raises(DataError, match="teacher_top_k is set, and the batch has no column teacher_top"):
        policy_loss(
            LossInputs(offsets_B1=torch.tensor([0, 8, 20]), columns={"logprobs": log_p[:, 0]}), config.resolve()
        )
