"""The same figures on an accelerator as on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from podium.algorithms import (
    AdvantageInputs,
    Aggregation,
    AlgorithmConfig,
    LossInputs,
    compute_advantages,
    loss_weights,
    partial_metrics,
    policy_loss,
)
from tests.unit.algorithms import oracles

pytestmark = pytest.mark.gpu


def on_gpu(inputs: AdvantageInputs) -> AdvantageInputs:
    columns: dict[str, Any] = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    columns |= {name: column.cuda() for name, column in columns.items() if isinstance(column, Tensor)}
    return AdvantageInputs(**columns)


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce_pp", "gae"])
def test_advantages(advantage: str) -> None:
    inputs = oracles.to_inputs(oracles.random_rows(0), torch.float32)
    config = AlgorithmConfig(advantage=advantage)
    outputs = compute_advantages(on_gpu(inputs), config)
    assert outputs.advantages_N.is_cuda
    expected = compute_advantages(inputs, config)
    torch.testing.assert_close(outputs.advantages_N.cpu(), expected.advantages_N, rtol=1e-5, atol=1e-5)


def test_weights_loss_and_metrics() -> None:
    inputs = oracles.to_inputs(oracles.random_rows(0), torch.float32)
    config = AlgorithmConfig(
        kl_in="loss",
        kl_coef=0.1,
        correction="truncate",
        entropy_coef=0.01,
        options={"dual_clip": 3.0, "weight_cap": 1.5},
    )
    names = ("logprobs", "old_logprobs", "advantages", "rollout_logprobs", "ref_logprobs", "entropy")
    columns = {
        name: torch.randn(len(inputs.mask_N), generator=torch.Generator().manual_seed(seed))
        for seed, name in enumerate(names)
    }
    for mode in get_args(Aggregation):
        results: list[dict[str, float]] = []
        for device in ("cpu", "cuda"):
            mask_N, offsets_B1 = inputs.mask_N.to(device), inputs.offsets_B1.to(device)
            weights_N = loss_weights(mask_N, offsets_B1, mode, constant=16)
            on_device = {name: column.to(device) for name, column in columns.items()}
            loss = policy_loss(LossInputs(offsets_B1=offsets_B1, columns=on_device), config)
            total = {"loss": float((weights_N * loss.loss_N).sum())}
            results.append(total | partial_metrics(loss, weights_N).means())
        assert results[0] == pytest.approx(results[1], rel=1e-4, abs=1e-6)
