"""What steers a run beside its loss: a critic that warms up, a bound of the KL, a target of the entropy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from podium.errors import CheckpointError, ConfigError
from podium.models import ModelConfig, load_model
from podium.telemetry import Note, metrics, subscribe
from podium.trainer import GRPOConfig, PPOConfig
from tests.integration.training import MODEL, metrics_rows, timeless, tiny, train

KEPT: dict[str, Any] = {"eval": {"items": 0}, "save": {"every": 1, "keep": 0, "model": False}}


def weights_of(run: Path, step: int, role: str = "policy") -> torch.Tensor:
    files = (run / "checkpoints" / f"step-{step:06d}" / role).glob("model*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return torch.cat([tensors[name].flatten().float() for name in sorted(tensors)])


def steps_of(run: Path, step: int, role: str) -> int:
    """The optimizer steps that a role has taken until the checkpoint of a step."""
    files = (run / "checkpoints" / f"step-{step:06d}" / role / "resume").glob("*.safetensors")
    return next(int(tensors["counts"][0]) for tensors in map(load_file, files) if "counts" in tensors)


@pytest.mark.parametrize("advantage", ["gae", pytest.param("gae_turns", marks=pytest.mark.exhaustive)])
def test_only_the_critic_is_trained_while_it_warms_up(tmp_path: Path, advantage: str) -> None:
    algorithm = {"advantage": advantage, "options": {"critic_warmup": 2}, "minibatches": 2}
    run = train(tiny(PPOConfig, tmp_path, algorithm=algorithm, run={"steps": 4}, **KEPT))
    policies, critics = ([weights_of(run, step, role) for step in range(1, 5)] for role in ("policy", "critic"))
    assert torch.equal(policies[0], policies[1])
    assert not any(torch.equal(policies[step - 1], policies[step]) for step in (2, 3))
    assert not any(torch.equal(critics[step - 1], critics[step]) for step in (1, 2, 3))
    assert [row[metrics.UPDATES] for row in metrics_rows(run)] == [0.0, 0.0, 2.0, 2.0]
    assert all(metrics.VALUE_LOSS in row for row in metrics_rows(run))


@pytest.mark.each_value
@pytest.mark.parametrize("schedule", ["linear", "constant"])
@pytest.mark.parametrize("trunk", ["separate", "shared"])
def test_the_policy_warms_up_from_its_first_step_and_its_critic_from_the_runs(
    tmp_path: Path, trunk: str, schedule: str
) -> None:
    """A policy that had waited for its value head began at the full rate. After that the head's rate was not told."""
    algorithm = {"minibatches": 2, "options": {"critic_warmup": 2, "critic_trunk": trunk}}
    optim = {"lr": 3e-3, "warmup_steps": 3, "lr_schedule": schedule}

    def rates(peak: float, updates: int) -> list[float]:
        falling = [1 - step / (updates - 3) if schedule == "linear" else 1.0 for step in range(updates - 3)]
        by_update = [peak * share for share in (1 / 3, 2 / 3, 1.0, *falling)]
        return [(first + second) / 2 for first, second in zip(by_update[::2], by_update[1::2], strict=True)]

    sections: dict[str, Any] = {"algorithm": algorithm, "optim": optim, "critic": {"lr": 6e-3}}
    rows = metrics_rows(train(tiny(PPOConfig, tmp_path, run={"steps": 6}, eval={"items": 0}, **sections)))
    assert [row[metrics.LEARNING_RATE] for row in rows if metrics.LEARNING_RATE in row] == pytest.approx(rates(3e-3, 8))
    assert [metrics.LEARNING_RATE in row for row in rows] == [False] * 2 + [True] * 4
    assert [row["value/learning_rate"] for row in rows] == pytest.approx(rates(6e-3, 12))


@pytest.mark.parametrize(("bound", "most"), [(1e-6, 2), (100.0, 6)])
def test_the_policy_stops_where_it_is_too_far_from_what_sampled(tmp_path: Path, bound: float, most: int) -> None:
    """The first update is at a KL of 0; the second one is further away, and is the last."""
    algorithm = {"epochs": {"count": 3, "max_kl": bound}, "minibatches": 2}
    reward = {"name": "tests.integration.rewards:sevens", "processes": 1}
    run = train(tiny(PPOConfig, tmp_path, algorithm=algorithm, reward=reward, batch={"prompts": 16}, **KEPT))
    assert [row[metrics.UPDATES] for row in metrics_rows(run)] == [most, most]
    assert steps_of(run, 2, "policy") == 2 * most
    assert steps_of(run, 2, "critic") == 12, "the critic takes every step"


def test_a_value_head_is_trained_alone_while_it_warms_up_and_after_the_bound(tmp_path: Path) -> None:
    options = {"critic_warmup": 1, "critic_trunk": "shared"}
    algorithm = {"epochs": {"count": 3, "max_kl": 1e-6}, "minibatches": 2, "options": options}
    reward = {"name": "tests.integration.rewards:sevens", "processes": 1}

    def run_of(name: str, steps: int, **run: Any) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        settings: dict[str, Any] = {"algorithm": algorithm, "reward": reward, "batch": {"prompts": 16}, **KEPT}
        return train(tiny(PPOConfig, tmp_path / name, run={"steps": steps, **run}, **settings))

    run, parts = run_of("whole", 3), run_of("parts", 2)
    weights = [weights_of(run, step) for step in (1, 2, 3)]
    start = load_model(ModelConfig(**cast("Any", MODEL))).state_dict()
    first = torch.cat([start[name].flatten() for name in sorted(start) if name != "lm_head.weight"])
    assert torch.equal(weights[0], first)
    assert not torch.equal(weights[0], weights[1])
    assert [row[metrics.UPDATES] for row in metrics_rows(run)] == [0.0, 2.0, 2.0]
    assert all(metrics.VALUE_LOSS in row for row in metrics_rows(run))
    assert [steps_of(run, step, "policy") for step in (1, 2, 3)] == [6, 12, 18]
    assert not (run / "checkpoints" / "step-000003" / "critic").exists()
    run_of("parts", 3, resume=str(parts))
    assert timeless(parts)[2] == timeless(run)[2], "resumed bit by bit"
    assert torch.equal(weights_of(parts, 3), weights[2])
    AutoModelForCausalLM.from_pretrained(
        run / "checkpoints" / "step-000003" / "policy"
    )  # a warning of an unknown tensor would be an error


@pytest.mark.everyday("bfloat16-0.25")
@pytest.mark.parametrize("share", (1.0, 0.25))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_follows_the_policy_and_resumes_bit_by_bit(tmp_path: Path, share: float, dtype: str) -> None:
    options = {"reference_refresh": 2, "reference_mix": share}
    algorithm = {"kl_in": "loss", "kl_coef": 0.5, "options": options, "minibatches": 2}
    # a weight in bfloat16 is one of the two nearest
    bounds: dict[str, Any] = (
        {"rtol": 1e-6, "atol": 1e-7} if dtype == "float32" or share == 1.0 else {"rtol": 2**-7, "atol": 1e-7}
    )

    def run_of(name: str, steps: int, **run: Any) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        model = {**MODEL, "dtype": dtype}
        settings: dict[str, Any] = {"algorithm": algorithm, "model": model, "run": {"steps": steps, **run}, **KEPT}
        return train(tiny(GRPOConfig, tmp_path / name, **settings))

    whole, parts = run_of("whole", 5), run_of("parts", 3)
    run_of("parts", 5, resume=str(parts))
    for role in ("policy", "reference"):
        assert torch.equal(weights_of(whole, 5, role), weights_of(parts, 5, role))
    start, second = weights_of(whole, 1, "reference"), weights_of(whole, 2, "reference")
    assert not torch.equal(start, second)
    torch.testing.assert_close(second, start.lerp(weights_of(whole, 2), share), **bounds)
    assert torch.equal(second, weights_of(whole, 3, "reference"))
    fourth = second.lerp(weights_of(whole, 4), share)
    torch.testing.assert_close(weights_of(whole, 5, "reference"), fourth, **bounds)
    kl = [row[metrics.KL] for row in metrics_rows(whole)]
    if share == 1.0:
        assert kl[2] < kl[1], "right after the refresh the policy is the reference again"
    with pytest.raises(CheckpointError, match=r"keep algorithm\.options\.reference_refresh"):
        train(tiny(GRPOConfig, tmp_path / "parts", run={"steps": 6, "resume": str(parts)},
                   model={**MODEL, "dtype": dtype}, algorithm={**algorithm, "options": {}}, **KEPT))  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_follows_small_updates_by_small_shares(tmp_path: Path, dtype: str) -> None:
    """Most updates are smaller than a step of bfloat16, and all shares of them are."""
    options = {"reference_refresh": 1, "reference_mix": 0.1}
    algorithm = {"kl_in": "loss", "kl_coef": 0.5, "options": options}
    run = train(tiny(GRPOConfig, tmp_path, algorithm=algorithm, model={**MODEL, "dtype": dtype},
                     optim={"lr": 3e-5}, run={"steps": 8}, **KEPT))  # fmt: skip
    policy = [weights_of(run, step) for step in range(1, 9)]
    reference = [weights_of(run, step, "reference") for step in range(1, 9)]
    exact = reference[0]
    for weights in policy[1:]:
        exact = exact.lerp(weights, 0.1)
    moved, expected = reference[-1] - reference[0], exact - reference[0]
    along = float((moved @ expected) / (expected @ expected))  # noise of rounding is at right angles, but for chance
    assert along == pytest.approx(1.0, abs=1e-3 if dtype == "float32" else 0.1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "share"),
    [
        ("fsdp2", 0.25),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("fsdp2", 1.0), ("replicate", 0.25))),
    ],
)
def test_the_reference_follows_the_policy_over_ranks(tmp_path: Path, strategy: str, share: float) -> None:
    """Each rank moves its own shard, and the checkpoint has the whole of it."""
    algorithm = {"kl_in": "loss", "options": {"reference_refresh": 1, "reference_mix": share}}
    ranks: dict[str, Any] = {"placement": {"ranks": 2}, "parallel": {"strategy": strategy}}
    run = train(tiny(GRPOConfig, tmp_path, algorithm=algorithm, **ranks, **KEPT), "local")
    first, second = (weights_of(run, step, "reference") for step in (1, 2))
    assert not torch.equal(first, second)
    torch.testing.assert_close(second, first.lerp(weights_of(run, 2), share), rtol=1e-6, atol=1e-7)
    if share == 1.0:
        assert torch.equal(second, weights_of(run, 2))


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"model": {**MODEL, "lora": {"rank": 2}}}, "with model.lora"),
        (
            {"placement": {"pools": {"one": {"roles": ["policy", "generator"]}, "two": {"roles": ["reference"]}}}},
            "with placement.pools",
        ),
    ],
)
def test_a_reference_that_cannot_follow_is_refused(tmp_path: Path, sections: dict[str, Any], why: str) -> None:
    algorithm = {"kl_in": "loss", "options": {"reference_refresh": 2}}
    with pytest.raises(ConfigError, match=f"algorithm.options.reference_refresh = 2 {why}"):
        tiny(GRPOConfig, tmp_path, algorithm=algorithm, **sections)
    with pytest.raises(ConfigError, match=r"unknown key algorithm\.options\.reference_refresh"):
        train(tiny(GRPOConfig, tmp_path, algorithm={"options": {"reference_refresh": 2}}))


@pytest.mark.exhaustive
def test_routers_are_balanced_alike_over_ranks_and_with_recomputed_layers(tmp_path: Path) -> None:
    """The shares of the experts are those of all ranks."""
    shape = {name: value for name, value in cast("dict[str, Any]", MODEL["config"]).items() if name != "head_dim"}
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    rows: list[list[float]] = []
    for ranks, strategy, again in ((1, "replicate", False), (2, "replicate", False), (2, "fsdp2", True)):
        folder = tmp_path / f"{ranks}-{strategy}"
        folder.mkdir()
        model = {**MODEL, "config": {**shape, **experts}, "gradient_checkpointing": again}
        sections: dict[str, Any] = {"placement": {"ranks": ranks}, "parallel": {"strategy": strategy}, "model": model}
        algorithm = {"minibatches": 2, "options": {"router_balance": 1.0}}
        run = train(tiny(GRPOConfig, folder, algorithm=algorithm, **sections, **KEPT), "local")
        rows.append([row[name] for row in metrics_rows(run) for name in ("policy/router_balance", metrics.GRAD_NORM)])
    assert rows[1] == pytest.approx(rows[0], rel=1e-4)
    assert rows[2] == pytest.approx(rows[0], rel=1e-4)


def test_the_entropy_bonus_follows_its_target_and_resumes_bit_by_bit(tmp_path: Path) -> None:
    target = {"target": 100.0, "delta": 0.05, "max": 0.15}

    def run_of(name: str, steps: int, **run: Any) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        sections = {"algorithm": {"entropy_coef": target, "minibatches": 2}, "run": {"steps": steps, **run}}
        return train(tiny(GRPOConfig, tmp_path / name, **sections, **KEPT))

    whole, parts = run_of("whole", 5), run_of("parts", 2)
    run_of("parts", 5, resume=str(parts))
    assert torch.equal(weights_of(whole, 5), weights_of(parts, 5))
    for run in (whole, parts):
        assert [row[metrics.ENTROPY_COEF] for row in metrics_rows(run)] == pytest.approx([0, 0.05, 0.1, 0.15, 0.15])
    (tmp_path / "constant").mkdir()
    algorithm = {"minibatches": 2}
    constant = train(tiny(GRPOConfig, tmp_path / "constant", algorithm=algorithm, run={"steps": 2}, **KEPT))
    assert torch.equal(weights_of(constant, 1), weights_of(whole, 1))
    assert not torch.equal(weights_of(constant, 2), weights_of(whole, 2)), "the bonus acts from the second step on"


@pytest.mark.parametrize(("kl_in", "estimator"), [("loss", "k3"), ("reward", "k1")])
def test_a_resume_takes_another_coefficient_of_the_kl_and_says_so(tmp_path: Path, kl_in: str, estimator: str) -> None:
    """Without a target the coefficient is a setting, which the checkpoint does not hold."""

    def run_of(steps: int, coef: float, **run: Any) -> Path:
        algorithm = {"kl_in": kl_in, "kl_coef": coef, "kl_estimator": estimator}
        return train(tiny(PPOConfig, tmp_path, algorithm=algorithm, run={"steps": steps, **run}, **KEPT))

    run = run_of(1, 0.25)
    said: list[str] = []
    unsubscribe = subscribe(lambda event: said.append(event.text) if isinstance(event, Note) else None)
    try:
        run_of(2, 0.5, resume=str(run))
    finally:
        unsubscribe()
    assert [row["policy/kl_coef"] for row in metrics_rows(run)] == [0.25, 0.5]
    told = (
        "settings that differ from those before the resume: algorithm.kl_coef = 0.5 (was 0.25), run.steps = 2 (was 1)"
    )
    assert told in said
