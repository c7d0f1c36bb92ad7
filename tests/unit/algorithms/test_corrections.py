"""Corrections for tokens that another policy drew, against their formulas in NumPy, and what must not change them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from podium.algorithms import CORRECTIONS, AlgorithmConfig, LossInputs, check_functions, partial_metrics, policy_loss
from podium.algorithms.corrections import correction_weights
from podium.config import load_config
from podium.errors import ConfigError, DataError
from podium.runs.named_code import list_code
from podium.trainer import GRPOConfig, PPOTrainer
from tests.unit.algorithms.oracles import Array

SEEDS = range(5)
Row = dict[str, Array]  # logprobs, old, rollout, advantages, entropy: of the tokens of one row
Formula = Callable[[list[Row]], list[Array]]


def by_token(formula: Callable[[Row], Array]) -> Formula:
    return lambda rows: [formula(row) for row in rows]


def ratio(row: Row) -> Array:
    return np.exp(row["old"] - row["rollout"])


def inside(values: Array, low: float, high: float) -> Array:
    return ((values >= low) & (values <= high)).astype(float)


def k3(row: Row) -> Array:
    """KL(rollout || old) from samples of the rollout: Schulman 2020."""
    return np.exp(row["old"] - row["rollout"]) - 1 - (row["old"] - row["rollout"])


def m2po(budget: float) -> Formula:
    """Zheng et al. 2025: leave out the largest squares until the mean of the others is within the budget."""

    def formula(rows: list[Row]) -> list[Array]:
        kept = [np.ones(len(row["old"])) for row in rows]
        squares = {
            (number, t): (row["logprobs"][t] - row["rollout"][t]) ** 2
            for number, row in enumerate(rows)
            for t in range(len(row["old"]))
            if (row["logprobs"][t] - row["rollout"][t]) * row["advantages"][t] > 0
        }
        while squares and np.mean(list(squares.values())) > budget:
            number, t = max(squares, key=lambda place: squares[place])
            kept[number][t] = squares.pop((number, t)) * 0
        return kept

    return formula


def high_entropy(share: float) -> Formula:
    def formula(rows: list[Row]) -> list[Array]:
        every = np.sort(np.concatenate([row["entropy"] for row in rows]))[::-1]
        bound = every[round(share * len(every)) - 1]
        return [(row["entropy"] >= bound).astype(float) for row in rows]

    return formula


def kpop(row: Row, bound: float) -> Array:
    """Guo et al. 2026: the divergence over this token and all others, in both directions."""
    p, q = (np.clip(np.exp(row[name]), 1e-6, 1 - 1e-6) for name in ("old", "rollout"))
    forward, backward = (x * np.log(x / y) + (1 - x) * np.log((1 - x) / (1 - y)) for x, y in ((p, q), (q, p)))
    return ((forward <= bound) & (backward <= bound)).astype(float)


def product(row: Row) -> Array:
    return np.full(len(row["old"]), float(np.prod(ratio(row))))


CASES: dict[str, tuple[dict[str, Any], Formula]] = {
    "truncate": ({"weight_cap": 1.2}, by_token(lambda row: np.minimum(ratio(row), 1.2))),
    "sequence_truncate": ({"weight_cap": 1.2}, by_token(lambda row: np.minimum(product(row), 1.2))),
    "icepop": (
        {"icepop_low": 0.9, "icepop_high": 1.3},
        by_token(lambda row: ratio(row) * inside(ratio(row), 0.9, 1.3)),
    ),
    "sequence_mask": (
        {"sequence_low": 0.8, "sequence_high": 1.3},
        by_token(lambda row: product(row) * inside(product(row), 0.8, 1.3)),
    ),
    "two_sided": ({"ratio_low": 0.9, "ratio_high": 1.2}, by_token(lambda row: inside(ratio(row), 0.9, 1.2))),
    "geometric": (
        {"geometric_low": 0.95, "geometric_high": 1.05},
        by_token(lambda row: inside(product(row) ** (1 / len(row["old"])), 0.95, 1.05)),
    ),
    "trust_region": (
        {"trust_kl": 0.03},
        by_token(lambda row: np.full(len(row["old"]), float(k3(row).max() <= 0.03))),
    ),
    "opsm": (
        {"opsm_threshold": 0.02},
        by_token(lambda row: 1.0 - ((row["advantages"] < 0) & ((row["rollout"] - row["logprobs"]).mean() > 0.02))),
    ),
    "m2po": ({"m2_budget": 0.02}, m2po(0.02)),
    "kpop": ({"kpop_kl": 0.005}, by_token(lambda row: kpop(row, 0.005))),
    "high_entropy": ({"entropy_share": 0.3}, high_entropy(0.3)),
    "bypass": ({}, by_token(lambda row: np.ones(len(row["old"])))),
}
PAPERS: dict[str, Formula] = {  # the figures of the papers, or of the code that the docstring names, once more
    "truncate": by_token(lambda row: np.minimum(ratio(row), 2.0)),
    "icepop": by_token(lambda row: ratio(row) * inside(ratio(row), 0.5, 5.0)),
    "sequence_mask": by_token(lambda row: product(row) * inside(product(row), 0.0, 3.0)),
    "geometric": by_token(lambda row: inside(product(row) ** (1 / len(row["old"])), 0.999, 1.001)),
    "m2po": m2po(0.04),
    "kpop": by_token(lambda row: kpop(row, 0.1)),
    "high_entropy": high_entropy(0.2),
}


def random_rows(seed: int, rows: int = 9) -> list[Row]:
    rng = np.random.default_rng(seed)
    made: list[Row] = []
    for _ in range(rows):
        length = int(rng.integers(1, 8))
        old = -rng.exponential(size=length) - 0.1
        made.append(
            {
                "old": old,
                "logprobs": old + rng.normal(size=length) / 8,
                "rollout": old + rng.normal(size=length) / 6,
                "advantages": np.full(length, float(rng.choice([-1.0, -0.5, 0.5, 2.0]))),
                "entropy": rng.exponential(size=length),
            }
        )
    return made


WEIGHING = sorted(name for name in CORRECTIONS if CORRECTIONS.declaration(name).weighs)


def to_inputs(rows: list[Row], config: AlgorithmConfig) -> LossInputs:
    names = {"logprobs": "logprobs", "old": "old_logprobs", "rollout": "rollout_logprobs", "advantages": "advantages"}
    columns = {
        column: torch.from_numpy(np.concatenate([row[name] for row in rows]))
        for name, column in {**names, "entropy": "entropy"}.items()
    }
    offsets = torch.tensor([0, *np.cumsum([len(row["old"]) for row in rows]).tolist()])
    inputs = LossInputs(offsets_B1=offsets, columns={**columns, "logprobs": columns["logprobs"].requires_grad_()})
    figures: dict[str, torch.Tensor] = {}
    for name in config.corrections:
        if (minibatch := CORRECTIONS.declaration(name).load_minibatch()) is not None:
            with torch.no_grad():
                figures |= minibatch(inputs, config)
    return replace(inputs, figures=figures)


def weigh(rows: list[Row], *names: str, **options: Any) -> torch.Tensor:
    config = AlgorithmConfig(correction=names, options=options)
    check_functions(config)
    weights_N = correction_weights(to_inputs(rows, config), config)
    assert weights_N is not None
    assert not weights_N.requires_grad
    return weights_N


def test_each_correction_has_a_formula_here() -> None:
    assert CASES.keys() == {*CORRECTIONS}
    assert all(CORRECTIONS.declaration(name).source for name in CORRECTIONS)


@pytest.mark.each_value
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_formula(name: str, seed: int) -> None:
    rows, (options, formula) = random_rows(seed), CASES[name]
    weights_N = weigh(rows, name, **options)
    np.testing.assert_allclose(weights_N, np.concatenate(formula(rows)), rtol=1e-9)
    assert name == "bypass" or len(weights_N.unique()) > 1  # both sides of what it decides take part


@pytest.mark.parametrize("name", PAPERS)
def test_the_defaults_are_the_figures_of_the_paper(name: str) -> None:
    rows = [{**row, "rollout": row["old"] + 8 * (row["rollout"] - row["old"])} for row in random_rows(7, rows=40)]
    np.testing.assert_allclose(weigh(rows, name), np.concatenate(PAPERS[name](rows)), rtol=1e-9)


@pytest.mark.parametrize("name", sorted({*CORRECTIONS} - {"high_entropy"}))
def test_where_generator_and_trainer_agree_nothing_changes(name: str) -> None:
    rows = [{**row, "rollout": row["old"], "logprobs": row["old"]} for row in random_rows(3)]
    assert weigh(rows, name).tolist() == [1.0] * sum(len(row["old"]) for row in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kpop_keeps_a_token_that_is_all_but_certain_to_either(dtype: torch.dtype) -> None:
    sure = {"old": np.array([0.0, -1e-4, -1e-9, -9.0, -0.2]), "rollout": np.array([-1e-4, 0.0, 0.0, -7.0, -0.9])}
    row = {**sure, "logprobs": sure["old"], "advantages": np.ones(5), "entropy": np.zeros(5)}
    config = AlgorithmConfig(correction="kpop")
    inputs = to_inputs([row], config)
    narrow = replace(inputs, columns={name: column.to(dtype) for name, column in inputs.columns.items()})
    weights_N = correction_weights(narrow, config)
    assert weights_N is not None
    assert weights_N.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]  # a ratio of 7.4 among the rare, of 2 among the usual


def test_several_corrections_are_multiplied() -> None:
    rows = random_rows(1)
    parts = [weigh(rows, name, **CASES[name][0]) for name in ("truncate", "two_sided", "high_entropy")]
    options = {**CASES["truncate"][0], **CASES["two_sided"][0], **CASES["high_entropy"][0]}
    together = weigh(rows, "truncate", "two_sided", "high_entropy", **options)
    torch.testing.assert_close(together, parts[0] * parts[1] * parts[2])


def test_weights_multiply_the_loss_and_are_measured() -> None:
    rows = random_rows(2)
    config = AlgorithmConfig(correction="icepop", options={"icepop_low": 0.9, "icepop_high": 1.3})
    inputs, weights_N = to_inputs(rows, config), weigh(rows, "icepop", icepop_low=0.9, icepop_high=1.3)
    plain, loss = (policy_loss(inputs, one.resolve()) for one in (AlgorithmConfig(), config))
    torch.testing.assert_close(loss.loss_N, plain.loss_N * weights_N)
    metrics = partial_metrics(loss, torch.full_like(weights_N, 1 / len(weights_N))).means()
    assert metrics["mismatch/weight_mean"] == pytest.approx(float(weights_N.mean()))
    assert metrics["mismatch/left_out"] == pytest.approx(float((weights_N == 0).double().mean()))
    size = float(weights_N.sum() ** 2 / weights_N.square().sum()) / len(weights_N)
    assert metrics["mismatch/effective_size"] == pytest.approx(size)
    assert "mismatch/weight_square" not in metrics
    assert not {"mismatch/weight_mean", "mismatch/effective_size"} & partial_metrics(plain, weights_N).means().keys()


def test_bypass_makes_the_ratio_one_to_the_generator() -> None:
    rows, config = random_rows(4), AlgorithmConfig(correction="bypass")
    inputs = to_inputs(rows, config)
    same = replace(inputs, columns={**inputs.columns, "old_logprobs": inputs.columns["rollout_logprobs"]})
    loss, expected = policy_loss(inputs, config.resolve()), policy_loss(same, AlgorithmConfig().resolve())
    torch.testing.assert_close(loss.loss_N, expected.loss_N)
    (gradient,), (right,) = (torch.autograd.grad(one.loss_N.sum(), inputs.logprobs_N) for one in (loss, expected))
    torch.testing.assert_close(gradient, right)
    assert config.ratio_to == "rollout"


@pytest.mark.parametrize("name", WEIGHING)
def test_weights_that_would_count_twice_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"bypass, whose ratio is to the generator already.*weights of {name} would"):
        check_functions(AlgorithmConfig(correction=("bypass", name)))
    own, bypass = (
        CORRECTIONS.declaration(one).function for one in (name, "bypass")
    )  # as functions of anybody's modules
    with pytest.raises(ConfigError, match=f"bypass, whose ratio is to the generator already.*weights of {own} would"):
        check_functions(AlgorithmConfig(correction=(bypass, own)))
    check_functions(AlgorithmConfig(correction=("bypass", "two_sided", "m2po")))


@pytest.mark.parametrize("name", WEIGHING)
def test_two_importance_weights_of_the_same_tokens_are_refused(name: str) -> None:
    other = "icepop" if name == "truncate" else "truncate"
    by_modules = (CORRECTIONS.declaration(other).function, CORRECTIONS.declaration(name).function)
    for pair in ((name, other), (name, name), by_modules):
        with pytest.raises(ConfigError, match=r"importance weights of the same tokens.*keep one of them"):
            check_functions(AlgorithmConfig(correction=pair))
    check_functions(AlgorithmConfig(correction=(name, "geometric", "opsm")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"correction": "icepo"}, "did you mean icepop"),
        ({"correction": ("none", "opsm")}, "expected auto or none alone"),
        ({"correction": "opsm", "options": {"opsm_treshold": 1.0}}, r"did you mean algorithm\.options\.opsm_threshold"),
        ({"correction": "truncate", "options": {"weight_cap": 0.5}}, "weight_cap"),
        ({"correction": "none", "options": {"weight_cap": 3.0}}, r"unknown key algorithm\.options\.weight_cap"),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_functions(AlgorithmConfig(**settings))


def test_options_of_the_usual_correction_may_be_set_whatever_the_schedule_is() -> None:
    check_functions(AlgorithmConfig(options={"weight_cap": 3.0}))


def test_the_former_key_is_answered_with_what_to_write() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(GRPOConfig, None, ["--algorithm.importance_cap", "2.0"])
    assert (
        "did you mean algorithm.correction? a number is correction truncate with algorithm.options.weight_cap"
        in str(caught.value)
    )


WRONG = """
import torch

def of_rows(inputs, config):
    return inputs.row_means(inputs.logprobs_N)

def a_number(inputs, config):
    return 1.0

def negative(inputs, config):
    return -torch.ones_like(inputs.logprobs_N)

def halves(inputs, config):
    return torch.full_like(inputs.logprobs_N, 0.5)
"""


def test_a_correction_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "own_corrections.py").write_text(WRONG)
    rows = random_rows(0)
    assert weigh(rows, f"{tmp_path}/own_corrections.py:halves").unique().tolist() == [0.5]
    for function, message in {
        "of_rows": r"returned shape \[9\]; expected a tensor of one weight a token",
        "a_number": "returned float; expected",
        "negative": "returned weights that are negative or not finite",
    }.items():
        with pytest.raises(DataError, match=message):
            weigh(rows, f"{tmp_path}/own_corrections.py:{function}")


def test_a_correction_in_a_file_is_code_that_a_configuration_names() -> None:
    algorithm = AlgorithmConfig(correction=("opsm", "mine.py:weights"), options={"path": "elsewhere"})
    named = list(list_code(GRPOConfig(algorithm=algorithm)))
    assert (("algorithm", "correction"), "mine.py:weights") in named
    assert (("algorithm", "options", "path"), "elsewhere") in named
    assert not any("opsm" in str(value) for _, value in named)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [({}, True), ({"loss": "dppo_tv"}, False), ({"correction": ("bypass", "m2po")}, False)],
)
def test_a_ratio_to_the_generator_saves_the_pass_for_the_old_policy(settings: dict[str, Any], needed: bool) -> None:
    for minibatches, expected in {2: needed, 1: False}.items():
        algorithm = AlgorithmConfig(**settings, minibatches=minibatches)
        assert PPOTrainer(GRPOConfig(algorithm=algorithm))._needs_old_logprobs == expected
        penalized = replace(algorithm, kl_in="reward")
        assert PPOTrainer(GRPOConfig(algorithm=penalized))._needs_old_logprobs


def test_auto_is_truncate_where_older_weights_draw_completions() -> None:
    for schedule, expected in {"sync": "none", "one_step_off": "truncate"}.items():
        settings = ["--run.schedule", schedule, "--placement.layout", "split"]
        assert load_config(GRPOConfig, None, settings).resolved_algorithm.correction == expected
        dppo = load_config(GRPOConfig, None, [*settings, "--algorithm.loss", "dppo_tv"])
        assert dppo.resolved_algorithm.correction == "none"
