"""Generators with vLLM in processes of their own, and beside a policy whose weights are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from podium import Cluster, connect
from podium.data import Batch, Jagged
from podium.models import ModelConfig
from podium.rollout.engines import EngineConfig
from podium.rollout.sampling import SamplingParams
from podium.runtime import colocate
from podium.telemetry import metrics
from podium.trainer import PRELOAD
from podium.training import OptimConfig, ParallelConfig
from podium.workers import ColocatedSync, Generator, Policy, StreamedSync, WeightSync
from podium_vllm import engine as engine_module
from tests.integration.test_environments import config_of, train
from tests.integration.training import MODEL, losses, metrics_rows
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
        engine_module._accelerators = lambda ranks: [torch.device("cpu")] * ranks
        engine_module.PART_BYTES = 5000
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


def sessions_of(world: str, folder: Path, **sections: Any) -> Any:
    """A run in a world, whose sessions vLLM draws."""
    engine = {"name": "vllm", "cache_gib": 0.1, "max_sequences": 8, **sections.pop("engine", {})}
    shape = {**MODEL["config"], "head_dim": 32, "max_position_embeddings": 64}
    model = {**MODEL, "config": shape}
    return config_of(world, folder, model=model, engine=engine, eval={"items": 0}, save={"model": False}, **sections)


def test_sessions_are_drawn_beside_the_policy_and_apart_from_it(tmp_path: Path) -> None:
    """Where the engine draws, a process has several threads or one."""
    found: list[list[float]] = []
    for layout in ("colocated", "split"):
        sampling = {"temperature": 0.7, "top_k": 6}
        config = sessions_of("twice", tmp_path / layout, sampling=sampling, placement={"layout": layout})
        run = train(config, "local")
        for row in metrics_rows(run):
            assert (row[metrics.SESSIONS_TRAINED], row[metrics.SESSIONS_TURNS]) == (16, 2)
            assert row[metrics.MISMATCH_MAX] < 1e-4
        found.append(losses(run))
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_runs_end_completions_with_texts_and_sessions_tell_what_else_is_probable(tmp_path: Path) -> None:
    """What is trained is what was sampled, up to the token that completes a text."""
    sampling = {"max_new_tokens": 8, "stop_token_ids": ["7", "33"], "top_k": 9}
    run = train(sessions_of("alternatives", tmp_path, sampling=sampling, run={"steps": 1}), "local")
    (row,) = metrics_rows(run)
    assert (row[metrics.SESSIONS_FAILED], row[metrics.SESSIONS_ROWS]) == (0, 16)
    assert row[metrics.MISMATCH_MAX] < 1e-4
    (path,) = (run / "completions").glob("*.parquet")
    reasons = pq.read_table(path).to_pydict()["finish_reason"]
    assert {*reasons} == {"stop", "length"}


def test_sessions_go_on_with_new_weights_and_each_token_has_its_version(tmp_path: Path) -> None:
    """What the current weights have drawn, the policy finds as probable, also behind tokens of older weights."""
    ahead = {"run": {"steps": 8, "schedule": "asynchronous"}, "placement": {"layout": "split"}}
    config = sessions_of("patient", tmp_path, options={"pause_s": 0.5}, **ahead)
    run = train(config, "local")
    mixed = 0
    for path in sorted((run / "completions").glob("*.parquet")):
        table = pq.read_table(path).to_pydict()
        for step, versions, differences in zip(
            table["step"], table["token_versions"], table["token_mismatch"], strict=True
        ):
            own = [abs(value) for value, version in zip(differences, versions, strict=True) if version == step - 1]
            assert max(own, default=0.0) < 1e-4
            mixed += bool(own) and len({*versions}) > 1
    assert mixed


def test_a_context_of_vllm_is_full_before_the_models(tmp_path: Path) -> None:
    run = train(sessions_of("endless", tmp_path, engine={"options": {"max_model_len": 32}}), "local")
    for row in metrics_rows(run):
        assert (row[metrics.SESSIONS_FULL], row[metrics.SESSIONS_FAILED]) == (1.0, 0.0)
