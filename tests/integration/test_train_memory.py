"""What has an entry for each token does not pass through the controller, however many tokens a step has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from podium.data import Batch, Jagged, TensorRef, fields
from podium.rollout.sampling import SamplingParams
from podium.runtime import Cluster, concat, endpoint, shard
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, PPOTrainer, completion_files, completions
from podium.workers import Generator
from tests.integration.training import MODEL, metrics_rows, tiny

CHUNK = 64  # tokens that may be in the controller together


class Endless(Generator):
    """Made-up completions, all of full length."""

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat(), returns="ref")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        heads = [head for head in prompts.jagged(fields.PROMPT_TOKENS).unbind() for _ in range(sampling.n)]
        tails = torch.randint(4, 14, (len(heads), sampling.max_new_tokens))
        tokens = Jagged.from_rows([torch.cat(row) for row in zip(heads, tails, strict=True)])
        sampled = torch.cat(
            [torch.arange(len(head) + len(tail)) >= len(head) for head, tail in zip(heads, tails, strict=True)]
        )
        columns: dict[str, Any] = {
            fields.TOKENS: tokens,
            fields.LOSS_MASK: tokens.like(sampled),
            fields.ROLLOUT_LOGPROBS: tokens.like(torch.full((len(sampled),), -2.0) * sampled),
            fields.VERSIONS: tokens.like(torch.zeros_like(tokens.values)),
            fields.GROUP: prompts.dense(fields.GROUP).repeat_interleave(sampling.n),
            fields.FINISH_REASON: ["length"] * len(heads),
        }
        return Batch(columns, {"temperature": sampling.temperature})


class Watched(PPOTrainer):
    """Notes the bytes of tensors that its batches hold when all their columns are there."""

    held = 0

    def update(self, batch: Batch, step: int, *others: Any, **named: Any) -> list[Mapping[str, float]]:
        for name in batch:
            column = batch[name]
            self.held += column.nbytes if isinstance(column, Tensor) else 0
            self.held += column.data.nbytes if isinstance(column, Jagged) and isinstance(column.data, Tensor) else 0
        return super().update(batch, step, *others, **named)


@pytest.mark.parametrize(
    "recipe",
    [
        {"kl_in": "reward", "kl_coef": 0.1, "epochs": 2, "minibatches": 2},
        pytest.param({}, marks=pytest.mark.exhaustive),
    ],
)
def test_ten_times_the_tokens_bring_no_more_bytes_to_the_controller(
    preloaded: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: dict[str, Any]
) -> None:
    monkeypatch.setattr(completions, "_GRADED_TOKENS", CHUNK)
    monkeypatch.setattr(completion_files, "_WRITTEN_TOKENS", CHUNK)
    fetched: list[int] = []
    get = TensorRef.get

    def noting(ref: TensorRef, **how: bool) -> Tensor:
        fetched.append(ref.nbytes)
        return get(ref, **how)

    monkeypatch.setattr(TensorRef, "get", noting)
    tokens: list[float] = []
    held: list[int] = []
    for name, length in (("short", 3), ("long", 60)):
        fetched.clear()
        config = tiny(
            GRPOConfig,
            tmp_path,
            run={"name": name, "steps": 1},
            model={"config": {**MODEL["config"], "max_position_embeddings": 64}},
            sampling={"max_new_tokens": length},
            algorithm={**recipe, "max_mismatch": None},  # the log-probabilities are made up
            eval={"items": 0},
        )
        trainer = Watched(config, cluster=preloaded, workers={"generator": Endless}, show=False)
        trainer.fit()
        run = tmp_path / "runs" / name
        tokens.append(metrics_rows(run)[0][metrics.TOKENS])
        held.append(trainer.held)
        assert max(fetched) <= CHUNK * 8  # int64 is the widest
        assert len(pq.read_table(run / "completions" / "step-000001.parquet")) == 16
    assert tokens == [16 * (3 + 3), 16 * (3 + 60)]
    assert held[0] == held[1] == 16 * (4 + 4 + 8 + 16)  # rewards, those of grades, groups and ranges of versions
