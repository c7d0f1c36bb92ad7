"""The settings of the algorithm: defaults that stand, and errors that name key, value and expectation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.algorithms import LOSSES, AlgorithmConfig, Declaration, LossInputs, check_functions, policy_loss
from podium.errors import ConfigError


def test_defaults() -> None:
    config = AlgorithmConfig()
    assert (config.clip_bounds, config.aggregation_mode) == ((0.2, 0.28), "token-mean")
    assert (config.kl_in, config.updates) == ("none", 1)
    assert not config.needs_reference
    assert AlgorithmConfig(kl_in="loss").needs_reference
    assert AlgorithmConfig(epochs=2, minibatches=4).updates == 8


def test_it_is_frozen_and_takes_keywords_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        AlgorithmConfig().gamma = 0.5  # pyright: ignore[reportAttributeAccessIssue] - the point of the test
    with pytest.raises(TypeError):
        AlgorithmConfig("grpo")  # pyright: ignore[reportCallIssue] - the point of the test


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "grop"}, "expected one of grpo, .*did you mean grpo"),
        (
            {"advantage": "gspo"},
            r"algorithm\.advantage = 'gspo' is a name for algorithm\.loss: write --algorithm\.loss gspo",
        ),
        ({"loss": "rloo"}, r"algorithm\.loss = 'rloo' is a name for algorithm\.advantage: write --"),
        ({"loss": {"ppo_clip": 1, "opo": 1}}, r"algorithm\.loss = 'opo' is a name for algorithm\.advantage"),
        ({"loss": "icepop"}, r"algorithm\.loss = 'icepop' is a name for algorithm\.correction"),
        ({"loss": {"ppo_clip": 0.0, "teacher_kl": 0.0}}, "all weights are 0, so that nothing is learned"),
        ({"kl_coef": 0.1}, "kl_coef = 0.1 with algorithm.kl_in = 'none': expected kl_coef 0, or kl_in set"),
        (
            {"kl_in": "loss", "kl_coef": 0.1, "kl_estimator": "k1"},
            "kl_estimator = 'k1' with .*expected 'k2', 'k3' or 'k1\\+'",
        ),
        ({"kl_in": "loss", "kl_coef": 0.1, "kl_target": 0.1}, "kl_target = 0.1 with kl_in = 'loss'"),
        ({"kl_in": "reward", "kl_target": 0.1}, "kl_target = 0.1 .*a positive kl_coef to start from"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AlgorithmConfig(**settings)


SETTINGS = {  # by what names functions: clip_low, clip_high, aggregation, normalize_advantage
    "": (0.2, 0.28, "token-mean", True),
    "rloo": (0.2, 0.28, "token-mean", False),
    "gae": (0.2, 0.2, "token-mean", True),
    "dr_grpo": (0.2, 0.28, "sequence-sum-constant", False),
    "gspo": (3e-4, 4e-4, "sequence-mean", True),
    "gmpo": (0.4, 0.4, "sequence-mean", True),
    "cispo": (1.0, 4.0, "token-mean", True),
    "sapo": (0.2, 0.28, "sequence-mean", True),
    "dppo_tv": (0.15, 0.15, "token-mean", True),
    "dppo_kl gae": (0.05, 0.05, "token-mean", True),
    "clip_cov": (1.0, 1.0, "token-mean", True),
    "gspo dr_grpo": (3e-4, 4e-4, "sequence-mean", False),
    "gspo gae": (3e-4, 4e-4, "sequence-mean", True),
}


@pytest.mark.parametrize("names", SETTINGS)
def test_losses_and_estimators_bring_the_settings_of_their_papers(names: str) -> None:
    chosen: dict[str, Any] = {("loss" if name in LOSSES else "advantage"): name for name in names.split()}
    config = AlgorithmConfig(**chosen)
    resolved = config.resolve()
    low, high, aggregation, normalizes = SETTINGS[names]
    assert config.clip_bounds == resolved.clip_bounds == (resolved.clip_low, resolved.clip_high) == (low, high)
    assert config.aggregation_mode == resolved.aggregation_mode == resolved.aggregation == aggregation
    assert config.normalizes(default=not normalizes) == resolved.normalize_advantage == normalizes
    assert resolved.resolve() == resolved


def test_a_setting_of_the_user_comes_first_and_each_has_its_origin() -> None:
    config = AlgorithmConfig(loss="gspo", clip_high=0.5, normalize_advantage=False)
    assert config.clip_bounds == (3e-4, 0.5)
    origins = {key: (value, origin.partition(":")[0]) for key, (value, origin) in config.explain().items()}
    assert origins == {
        "clip_low": (3e-4, "default of the loss gspo"),
        "clip_high": (0.5, "yours"),
        "aggregation": ("sequence-mean", "default of the loss gspo"),
        "normalize_advantage": (False, "yours"),
    }
    assert AlgorithmConfig().explain()["clip_high"].origin.startswith("default of the recipe: Yu et al. 2025, DAPO")
    assert AlgorithmConfig(advantage="gae").explain()["clip_high"].origin.startswith("default with a critic: Schulman")


OWN = r"""
from podium.algorithms import Declaration, TokenLoss

@Declaration(defaults={"clip_high": 4.0, "aggregation": "sequence-mean"}, source="Nobody 2026,\n  equation 1")
def declared(inputs, config):
    return TokenLoss(-inputs.logprobs_N * config.clip_high)

@Declaration(defaults={"clip_low": -1.0})
def out_of_range(inputs, config):
    return TokenLoss(-inputs.logprobs_N)

def plain(inputs, config):
    return TokenLoss(-inputs.logprobs_N)
"""


def test_a_loss_of_the_users_own_declares_defaults(tmp_path: Path) -> None:
    file = tmp_path / "losses_with_defaults.py"
    file.write_text(OWN)
    config = AlgorithmConfig(loss=f"{file}:declared")
    check_functions(config)
    assert config.clip_bounds == (0.2, 4.0)
    assert config.explain()["aggregation"] == (
        "sequence-mean",
        f"default of the loss {file}:declared: Nobody 2026, equation 1",
    )
    assert AlgorithmConfig(loss=f"{file}:plain").clip_bounds == (0.2, 0.28)
    loss = policy_loss(
        LossInputs(offsets_B1=torch.tensor([0, 1]), columns={"logprobs": torch.tensor([-1.0])}), config.resolve()
    )
    assert loss.loss_N.tolist() == [4.0]  # what is passed to a loss has no null
    with pytest.raises(ConfigError, match=r"clip_low = -1\.0: expected a number above 0"):
        check_functions(AlgorithmConfig(loss=f"{file}:out_of_range"))
    with pytest.raises(ConfigError, match=r"Declaration\.defaults has \['kl_coef'\]: expected some of clip_low"):
        Declaration(defaults={"kl_coef": 0.1})
