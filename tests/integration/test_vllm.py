"""Generators with vLLM in processes of their own, and beside a policy whose weights are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from podium import Cluster, connect
from podium.data import Batch, Jagged
from podium.rollout.engines import EngineConfig, vllm
from podium.rollout.sampling import SamplingParams
from podium.runtime import colocate
from podium.trainer import PRELOAD
from podium.workers import (
    ColocatedSync,
    Generator,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    Policy,
    StreamedSync,
    WeightSync,
)
from tests.unit.workers.tiny import ADAPTED, TINY, recorded

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

OPTIM = OptimConfig(lr=1e-2)
FSDP2 = ParallelConfig(strategy="fsdp2")
WIDE = replace(TINY, config={**TINY.config, "head_dim": 32})  # vLLM's attention for CPUs takes no smaller heads
ADAPTED_WIDE = replace(ADAPTED, config=WIDE.config)
VLLM = EngineConfig(name="vllm", cache_gib=0.1, max_sequences=8)
SAMPLING = SamplingParams(max_new_tokens=20, n=4, top_k=6)
PROMPTS = Batch(
    {
        "prompt_tokens": Jagged.from_rows([torch.tensor([5, 14, 6, 15]), torch.tensor([9, 15]), torch.tensor([4])]),
        "seed": torch.arange(12).view(3, 4),
        "group": torch.arange(3),
    }
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with connect("local", log_dir=tmp_path_factory.mktemp("logs"), preload=PRELOAD) as running:
        yield running


def check(policy: Any, generator: Any, sync: WeightSync) -> None:
    """After each sync, vLLM draws from the policy's weights."""
    for version in range(1, 4):
        sync.sync(version)
        out = generator.generate(PROMPTS, SAMPLING).fetch()
        trained = policy.logprobs(out).fetch().jagged("old_logprobs").values
        assert (out.jagged("rollout_logprobs").values - trained).abs().max() < 1e-4
        assert set(out.jagged("versions").values[out.jagged("loss_mask").values].tolist()) == {version}
        policy.update(recorded(seed=version))


@pytest.mark.parametrize("delta", [False, True], ids=["all", "delta"])
def test_weights_reach_generators_in_other_processes(cluster: Cluster, delta: bool) -> None:
    policy = cluster.start(Policy.bind(ADAPTED_WIDE if delta else WIDE, OPTIM), cluster.pool([1]))
    generator = cluster.start(Generator.bind(replace(WIDE, seed=5), VLLM), cluster.pool([2]))
    sync = StreamedSync(policy, [generator], delta=delta)
    sync.init()
    check(policy, generator, sync)
    for handle in (generator, policy):
        handle.group.close()


class Spread(Generator):
    """A CPU stands for two accelerators."""

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        vllm._accelerators = lambda ranks: [torch.device("cpu")] * ranks
        vllm.PART_BYTES = 5000
        super().__init__(model, engine)


def test_two_processes_of_vllm_compute_together(cluster: Cluster) -> None:
    policy = cluster.start(Policy.bind(WIDE, OPTIM), cluster.pool([1]))
    engine = replace(VLLM, options={"tensor_parallel_size": 2})
    generator = cluster.start(Spread.bind(replace(WIDE, seed=5), engine), cluster.pool([1]))
    sync = StreamedSync(policy, [generator])
    sync.init()
    check(policy, generator, sync)
    for handle in (generator, policy):
        handle.group.close()


@pytest.mark.parametrize("parallel", [None, FSDP2], ids=["replicated", "fsdp2"])
def test_weights_are_read_from_a_policy_in_the_same_process(cluster: Cluster, parallel: ParallelConfig | None) -> None:
    both = cluster.start(
        colocate(policy=Policy.bind(WIDE, OPTIM, parallel), generator=Generator.bind(WIDE, VLLM)), cluster.pool([2])
    )
    check(both.policy, both.generator, ColocatedSync(both.generator))
    both.generator.group.close()
    both.policy.group.close()
