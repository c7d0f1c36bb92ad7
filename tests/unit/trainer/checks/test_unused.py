from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from podium.algorithms import LOSSES, AlgorithmConfig
from podium.rollout.environments import EnvironmentConfig
from podium.rollout.tasks import DataConfig
from podium.trainer import EvalConfig, GRPOConfig, PPOConfig, SFTConfig, build_config
from podium.trainer.checks.unused import find_unused_settings


def test_supervised_fine_tuning_uses_what_sessions_do_not() -> None:
    environment, data = EnvironmentConfig(name="world:play"), DataConfig(max_prompt_tokens=7)
    (sentences,) = find_unused_settings(GRPOConfig(environment=environment, data=data))
    assert sentences.startswith("data.max_prompt_tokens = 7 has no effect with environment.name")
    (sentences,) = find_unused_settings(SFTConfig(environment=environment, data=data))
    assert sentences.startswith("environment.name has no effect: a loss judges the run")
    sampled = SFTConfig(environment=environment, data=data, eval=EvalConfig(metric="reward"))
    assert find_unused_settings(sampled) == find_unused_settings(GRPOConfig(data=data)) == []


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (
            {"loss": "sapo", "clip_low": 0.1},
            "algorithm.clip_low = 0.1 has no effect with algorithm.loss = 'sapo'",
        ),
        ({"lam": 0.9}, "algorithm.lam = 0.9 has no effect with algorithm.advantage = 'grpo'"),
        ({"advantage": "rloo", "gamma": 0.9}, "algorithm.gamma = 0.9 has no effect with algorithm.advantage = 'rloo'"),
        ({"value_clip": 0.5}, "algorithm.value_clip = 0.5 has no effect with algorithm.advantage = 'grpo'"),
        ({"loss": "gspo", "clip_low": 0.1}, ""),
        ({"loss": "clip_cov", "clip_low": 0.1}, ""),
        ({"advantage": "gae", "lam": 0.9, "gamma": 0.9, "value_clip": None}, ""),
        ({"loss": "file.py:mine", "advantage": "file.py:mine", "clip_low": 0.1, "lam": 0.9}, ""),
    ],
)
def test_a_setting_that_nothing_reads_is_told(algorithm: dict[str, Any], expected: str) -> None:
    sentences = find_unused_settings(GRPOConfig(algorithm=AlgorithmConfig(**algorithm)))
    assert len(sentences) == bool(expected)
    assert "".join(sentences).startswith(expected)


@pytest.mark.parametrize(
    ("section", "values", "expected"),
    [
        ("algorithm", {"kl_estimator": "k2"}, "algorithm.kl_estimator = 'k2' has no effect with algorithm.kl_in = "),
        ("algorithm", {"kl_estimator": "k2", "kl_in": "loss"}, ""),
        ("algorithm", {"epochs": {"count": 1, "max_kl": 0.1}}, "algorithm.epochs.max_kl = 0.1 has no effect where"),
        ("algorithm", {"epochs": {"count": 1, "max_kl": 0.1}, "minibatches": 2}, ""),
        ("algorithm", {"options": {"weight_cap": 3.0}}, "algorithm.options.weight_cap = 3.0 has no effect with"),
        ("algorithm", {"options": {"weight_cap": 3.0}, "correction": "truncate"}, ""),
        (
            "algorithm",
            {"kl_in": "loss", "options": {"reference_mix": 0.5}},
            "algorithm.options.reference_mix = 0.5 has",
        ),
        ("algorithm", {"kl_in": "loss", "options": {"reference_mix": 0.5, "reference_refresh": 2}}, ""),
        (
            "algorithm",
            {"loss": "teacher_kl", "options": {"teacher": "t", "teacher_divergence": "forward"}},
            "algorithm.options.teacher_divergence = 'forward' has no effect without algorithm.options.teacher_top_k",
        ),
        (
            "algorithm",
            {"loss": "teacher_kl", "options": {"teacher": "t"}, "normalize_advantage": False},
            "algorithm.normalize_advantage = False has no effect with algorithm.loss = 'teacher_kl'",
        ),
        ("algorithm", {"loss": {"teacher_kl": 1.0, "ppo_clip": 1.0}, "normalize_advantage": False}, ""),
        ("algorithm", {"loss": "cross_entropy"}, "algorithm.loss = 'cross_entropy' learns all completions alike"),
        ("algorithm", {"loss": "kl_cov"}, "algorithm.options.kl_cov_coef has no effect where a step is one update"),
        ("algorithm", {"loss": "kl_cov", "minibatches": 2}, ""),
        ("algorithm", {"loss": {"kl_cov": 1.0, "dro": 0.1}}, "algorithm.options.kl_cov_coef has no effect"),
        (
            "reward",
            {"name": ["math", "length"], "weights": [0, 0]},
            "reward.weights are all 0, so that every completion",
        ),
        ("reward", {"name": ["math", "length"], "weights": [0, 1]}, ""),
        ("critic", {"lr": 0.1}, "critic.lr = 0.1 has no effect with algorithm.advantage = 'grpo'"),
        ("critic", {"path": "x"}, "critic.path = 'x' has no effect with algorithm.advantage = 'grpo'"),
        ("run", {"max_staleness": 4}, "run.max_staleness = 4 has no effect with run.schedule = 'sync'"),
        ("run", {"max_staleness": 4, "schedule": "asynchronous"}, ""),
        ("optim", {"master_weights": False}, "optim.master_weights = false has no effect with model.dtype"),
    ],
)
def test_a_setting_that_needs_another_one_is_told(section: str, values: dict[str, Any], expected: str) -> None:
    sentences = find_unused_settings(build_config(GRPOConfig, {section: values}))
    assert len(sentences) == bool(expected)
    assert "".join(sentences).startswith(expected)


def test_a_precision_that_the_data_type_of_the_model_overrules_is_told() -> None:
    half = {"model": {"dtype": "bfloat16", "path": "x"}}
    for precision in ("float32", {"compute": "float32", "output": "float32"}):
        (sentence,) = find_unused_settings(build_config(GRPOConfig, {**half, "parallel": {"precision": precision}}))
        assert sentence.startswith("parallel.precision = float32 has no effect with model.dtype = 'bfloat16'")
    for precision in ("auto", "bfloat16", "float16"):
        assert not find_unused_settings(build_config(GRPOConfig, {**half, "parallel": {"precision": precision}}))


def test_weights_of_zero_are_told_of_what_an_environment_does_not_score() -> None:
    values = {"environment": {"name": "game.py:Game"}, "reward": {"name": ["math", "length"], "weights": [0, 0]}}
    (sentence,) = find_unused_settings(build_config(GRPOConfig, values))
    assert sentence.startswith("reward.weights are all 0, so that a completion that the environment does not score")


def test_a_package_that_cannot_be_imported_is_no_concern_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"broken": EntryPoint("broken", "podium_absent:broken", "podium.losses")}
    monkeypatch.setattr("podium.algorithms.declarations.find_packaged", lambda group: broken)
    monkeypatch.setattr("podium.algorithms.declarations.is_installed", lambda entry: True)
    assert "broken" in LOSSES
    (sentence,) = find_unused_settings(GRPOConfig(algorithm=AlgorithmConfig(loss="reinforce", clip_low=0.1)))
    assert sentence.endswith("the installed functions that read it are ppo_clip, gspo, cispo")


def test_defaults_of_a_recipe_are_no_settings_of_the_user() -> None:
    assert find_unused_settings(PPOConfig()) == find_unused_settings(GRPOConfig()) == []
    without_kl = build_config(PPOConfig, {"algorithm": {"kl_in": "none", "kl_coef": 0.0}})
    assert find_unused_settings(without_kl) == [], "the recipe itself sets kl_estimator"
    with_critic = build_config(PPOConfig, {"critic": {"lr": 0.1}})
    assert find_unused_settings(with_critic) == []


@pytest.mark.parametrize(("steps", "told"), [(3, True), (4, False)])
def test_a_run_that_never_trains_its_policy_says_so(steps: int, told: bool) -> None:
    values = {"run": {"steps": steps}, "algorithm": {"options": {"critic_warmup": 3}}}
    sentences = find_unused_settings(build_config(PPOConfig, values))
    assert bool(sentences) is told
    assert "".join(sentences).startswith("the policy is not trained" if told else "")


def test_a_replay_reads_nothing_of_the_engine_but_its_run() -> None:
    engine = {"name": "replay", "options": {"run": "runs/a"}, "max_sequences": 4, "dtype": "float32"}
    sentences = find_unused_settings(build_config(GRPOConfig, {"engine": engine, "eval": {"items": 0}}))
    assert [sentence.split(" ")[0] for sentence in sentences] == ["engine.max_sequences", "engine.dtype"]


FILES = {"train": "rows.csv"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"data": {**FILES, "options": {"sep": ";"}}}, "data.options has no effect with files"),
        ({"data": {**FILES, "eval": "owner/name", "options": {"name": "main"}}}, ""),
        ({"data": {**FILES, "train_split": "validation"}}, "data.train_split = 'validation' has no effect with files"),
        ({"data": {"train": "owner/name", "eval_split": "validation"}}, ""),
        ({"data": {"train": "runs/.data/0.parquet", "train_split": "validation"}}, ""),
        ({"environment": {"options": {"level": 3}}}, "environment.options has no effect"),
        (
            {"engine": {"name": "transformers", "cache_gib": 2.0}},
            "engine.cache_gib = 2.0 has no effect with engine.name",
        ),
        ({"engine": {"name": "transformers", "max_sequences": 4}}, ""),
        ({"engine": {"cache_gib": 2.0}}, ""),
        ({"data": FILES}, ""),
        ({"eval": {"items": 0, "every": 5}}, "eval.every = 5 has no effect with eval.items = 0"),
        ({"eval": {"items": 0}, "save": {"keep_best": 1}}, "save.keep_best = 1 has no effect with eval.items = 0"),
    ],
)
@pytest.mark.parametrize("recipe", [GRPOConfig, SFTConfig])
def test_settings_of_data_and_evaluations_that_nothing_reads_are_told(
    recipe: type[GRPOConfig] | type[SFTConfig], values: dict[str, Any], expected: str
) -> None:
    sentences = find_unused_settings(build_config(recipe, values))
    assert len(sentences) == bool(expected)
    assert "".join(sentences).startswith(expected)
