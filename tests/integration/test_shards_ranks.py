"""Ranks that read their shards alone train as ranks that load the whole model do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from podium.errors import WorkerStartError
from podium.models import ModelConfig, load_model
from podium.runtime import Cluster, endpoint, gather
from podium.training import OptimConfig, ParallelConfig
from podium.training.data_parallel import is_sharded
from podium.workers import Critic, Policy, Reference
from tests.integration.test_workers_ranks import CAPPED, started
from tests.unit.workers.tiny import TINY, recorded

FSDP2 = ParallelConfig(strategy="fsdp2")
OPTIM = OptimConfig(lr=1e-3)


@pytest.fixture(scope="module")
def cluster(preloaded: Cluster) -> Cluster:
    return preloaded


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])  # rchar


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Watched(Policy):
    """Tells what it read, and whether the model came in shards."""

    def make_model(self) -> nn.Module:
        before = read_bytes()
        model = super().make_model()
        self.read, self.sharded = read_bytes() - before, is_sharded(model)
        return model

    @endpoint(collect=gather())
    def kept_of_freed_memory(self) -> int:
        """Bytes that stay in the process of blocks that were freed."""
        blocks = [torch.ones(24 << 20, dtype=torch.uint8)]
        blocks.clear()  # from now on glibc keeps such blocks, if nobody tells it otherwise
        before, small = resident(), list[torch.Tensor]()
        for _ in range(6):
            blocks.append(torch.ones(8 << 20, dtype=torch.uint8))
            small.append(torch.ones(1 << 16, dtype=torch.uint8))  # stays, above the large block
        blocks.clear()
        return resident() - before

    @endpoint(collect=gather())
    def loading(self) -> tuple[int, bool]:
        return self.read, self.sharded


class Whole(Policy):
    def make_model(self) -> nn.Module:
        return load_model(self.config, self.device)


class WholeCritic(Critic):
    def make_model(self) -> nn.Module:
        model = load_model(self.config, self.device, spared=("lm_head.*",))
        self._give_head(model)
        return model


@pytest.mark.exhaustive
def test_shards_read_alone_train_as_whole_models_do(cluster: Cluster, tmp_path: Path) -> None:
    """To the last bit, with rows that do not divide by the ranks, tied weights and a soft cap."""
    load_model(replace(CAPPED, config={**CAPPED.config, "intermediate_size": 63})).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), tokenizer=CAPPED.tokenizer)
    found: list[list[float]] = []
    for policy, critic in ((Watched, Critic), (Whole, WholeCritic)):
        workers = {
            "policy": policy.bind(config, OPTIM, FSDP2),
            "critic": critic.bind(config, OPTIM, FSDP2),
            "reference": Reference.bind(config, FSDP2),
        }
        with started(cluster, 2, **workers) as group:
            own: list[float] = []
            if policy is Watched:
                assert all(sharded for _, sharded in group.policy.loading())
            own += group.reference.logprobs(recorded()).fetch().jagged("ref_logprobs").values.tolist()
            for seed in range(2):
                batch = recorded(seed=seed)
                own += group.critic.values(batch).fetch().jagged("values").values.tolist()
                own += [group.policy.update(batch)["loss"], group.critic.update(batch)["value/loss"]]
            found.append(own)
    assert found[0] == found[1]


def test_each_rank_reads_its_share_of_the_files(cluster: Cluster, tmp_path: Path) -> None:
    shape = replace(TINY, config={**TINY.config, "hidden_size": 256, "intermediate_size": 6144})
    load_model(shape).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), tokenizer=shape.tokenizer)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 30_000_000
    with started(cluster, 2, policy=Watched.bind(config, OPTIM, FSDP2)) as group:
        for read, sharded in group.policy.loading():
            assert sharded
            assert read < size * 0.6
        assert max(group.policy.kept_of_freed_memory()) < 4 << 20  # of layers that were gathered, nothing stays


class Apart(Policy):
    """Its ranks have files of their own."""

    def make_model(self) -> nn.Module:
        self.config = replace(self.config, path=f"{self.config.path}/{self.ctx.rank}")
        return super().make_model()


def test_files_that_differ_from_rank_to_rank_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    for rank in range(2):
        load_model(replace(TINY, seed=rank)).save_pretrained(tmp_path / str(rank))
    config: Any = ModelConfig(path=str(tmp_path), tokenizer=TINY.tokenizer)
    policy = Apart.bind(config, OPTIM, FSDP2)
    with (
        pytest.raises(WorkerStartError, match="its files differ from rank to rank"),
        started(cluster, 2, policy=policy),
    ):
        pass
