"""Training gives the same losses however ranks and micro-batches cut the work, on processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from podium.algorithms import AlgorithmConfig
from podium.data import Batch, Jagged
from podium.errors import EndpointError
from podium.models import ModelConfig
from podium.rollout.sampling import SamplingParams
from podium.runtime import Bound, Cluster, colocate, connect, endpoint, gather, shard
from podium.trainer import PRELOAD
from podium.training import OptimConfig, ParallelConfig
from podium.training.config import Strategy
from podium.training.micro_batches import plan
from podium.workers import ColocatedSync, Critic, Generator, Policy, StreamedSync
from tests.integration.training import slots
from tests.unit.workers.tiny import ADAPTED, LENGTHS, TINY, oracle_logprobs, recorded

STEPS = 8
WHOLE, QUARTERS = 1000, 36  # token budgets that cut the recorded rows into 1 and 4 micro-batches on one rank
OPTIM = OptimConfig(lr=1e-3, warmup_steps=3)
GRPO = AlgorithmConfig(
    kl_in="loss", kl_coef=0.05, entropy_coef=0.01, correction="truncate", aggregation="sequence-mean"
)
IMITATION = AlgorithmConfig(loss="cross_entropy")
PPO = AlgorithmConfig(advantage="gae")
TRUNK = AlgorithmConfig(advantage="gae", options={"critic_trunk": "shared", "value_coef": 0.5})
CAPS = {"final_logit_softcapping": 0.5, "attn_logit_softcapping": None}
CAPPED = replace(TINY, config={**TINY.config, "model_type": "gemma2", **CAPS})  # a critic's values pass no cap


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, preloaded: Cluster) -> Iterator[Cluster]:
    """Local, or the backend that a test names."""
    backend = getattr(request, "param", "local")
    if backend == "local":
        yield preloaded
        return
    with connect(backend, preload=PRELOAD) as running:
        yield running


@contextmanager
def started(cluster: Cluster, ranks: int, **workers: Bound[Any]) -> Iterator[Any]:
    """The workers in the same processes, closed at the end, so that one test's failure is not the next one's."""
    with slots(cluster, ranks) as pool:
        group = cluster.start(colocate(**workers), pool)
        try:
            yield group
        finally:
            for name in workers:
                group[name].group.close()


def roles(parallel: ParallelConfig) -> dict[str, Bound[Any]]:
    """The workers of three runs, which need not know of one another."""
    return {
        "sft": Policy.bind(TINY, OPTIM, parallel, AlgorithmConfig(loss="cross_entropy")),
        "grpo": Policy.bind(TINY, OPTIM, parallel, GRPO),
        "ppo": Policy.bind(TINY, OPTIM, parallel, PPO),
        "critic": Critic.bind(CAPPED, OPTIM, parallel),
        "trunk": Policy.bind(TINY, OPTIM, parallel, TRUNK, value_lr=1e-2),
    }


def sft(group: Any) -> list[float]:
    batch = recorded().select("tokens", "loss_mask", "loss_weights")
    return [group.sft.update(batch)["loss"] for _ in range(STEPS)]


def grpo(group: Any) -> list[float]:
    """Four steps on each of three recorded batches, as with several epochs: ratios leave 1 and clipping acts.

    Their rows have two prompts, which they share in a forward pass.
    """
    losses: list[float] = []
    assert all(group.grpo.group.run(lambda worker: worker.engine.shares_prompts))
    for number in range(STEPS // 4):
        batch = recorded(None, seed=number).drop("loss_weights")
        batch = batch.with_columns({"group": torch.arange(len(batch)) // 4})
        batch = batch.merge(group.grpo.logprobs(batch), keep="other")
        losses += [group.grpo.update(batch)["loss"] for _ in range(4)]
    return losses


def ppo(group: Any) -> list[float]:
    losses: list[float] = []
    for number in range(STEPS):
        batch = recorded(seed=number)
        batch = batch.merge(group.ppo.logprobs(batch), keep="other").merge(group.critic.values(batch), keep="other")
        losses += [group.ppo.update(batch)["loss"], group.critic.update(batch)["value/loss"]]
    return losses


def trunk(group: Any) -> list[float]:
    """A policy that is its own critic. Some of the steps train its head alone."""
    losses: list[float] = []
    for number in range(STEPS):
        batch = recorded(seed=number).with_meta(head_alone=number % 4 == 1)
        row = group.trunk.update(batch.merge(group.trunk.values(batch), keep="other"))
        losses += [row.get("loss", 0.0), row["value/loss"]]
    return losses


RECIPES = (sft, grpo, ppo, trunk)


@pytest.fixture(scope="module")
def whole(preloaded: Cluster) -> dict[str, list[float]]:
    """The losses of each recipe on one rank, in one micro-batch."""
    with started(preloaded, 1, **roles(ParallelConfig(micro_batch_tokens=WHOLE))) as group:
        return {recipe.__name__: recipe(group) for recipe in RECIPES}


@pytest.mark.everyday("2-1000-replicate")
@pytest.mark.parametrize(
    ("ranks", "budget", "strategy"),
    [
        (2, QUARTERS, "fsdp2"),
        (2, WHOLE, "replicate"),
        pytest.param(1, QUARTERS, "replicate", marks=pytest.mark.exhaustive),
        pytest.param(2, QUARTERS, "replicate", marks=pytest.mark.exhaustive),
    ],
)
def test_losses_do_not_depend_on_ranks_or_micro_batches(
    preloaded: Cluster, whole: dict[str, list[float]], ranks: int, budget: int, strategy: Strategy
) -> None:
    assert len(plan([length - 1 for length in LENGTHS], QUARTERS, packed=False)) == 4
    with started(preloaded, ranks, **roles(ParallelConfig(micro_batch_tokens=budget, strategy=strategy))) as group:
        for recipe in RECIPES:
            assert recipe(group) == pytest.approx(whole[recipe.__name__], abs=1e-5), recipe.__name__


@pytest.mark.everyday("fsdp2")
@pytest.mark.parametrize("strategy", ["replicate", "fsdp2"])
def test_gradients_that_are_accumulated_add_up_over_ranks(preloaded: Cluster, strategy: Strategy) -> None:
    """Reinforcement and examples before one step, whose batches lie on the ranks in unlike shares."""
    batch, examples = recorded(None), recorded(None, seed=1).take(range(3))
    examples = examples.select("tokens", "loss_mask")
    metrics: list[dict[str, float]] = []
    for ranks in (1, 2):
        parallel = ParallelConfig(micro_batch_tokens=QUARTERS, strategy="replicate" if ranks == 1 else strategy)
        with started(preloaded, ranks, policy=Policy.bind(TINY, OPTIM, parallel, GRPO)) as group:
            for _ in range(2):
                row = group.policy.accumulate(batch)
                row |= {"examples": group.policy.accumulate(examples, IMITATION, weight=0.5)["loss"]}
                metrics.append({**row, **group.policy.step(grad_clip=0.1)})
    assert metrics[2:] == [pytest.approx(row, rel=1e-4, abs=1e-5) for row in metrics[:2]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("head_alone", [False, True])
def test_ranks_with_unlike_numbers_of_passes_train_a_value_head(preloaded: Cluster, head_alone: bool) -> None:
    """The passes without rows of a sharded model have gradients of the head too: else ranks wait for each other."""
    batch = recorded((9, 9, 9)).with_meta(head_alone=head_alone)
    rows: list[list[dict[str, float]]] = []
    for ranks in (1, 2):
        parallel = ParallelConfig(micro_batch_tokens=9, strategy="replicate" if ranks == 1 else "fsdp2")
        with started(preloaded, ranks, policy=Policy.bind(TINY, OPTIM, parallel, TRUNK, value_lr=1e-2)) as group:
            rows.append([group.policy.update(batch) for _ in range(3)])
    assert rows[1] == [pytest.approx(row, rel=1e-4, abs=1e-5) for row in rows[0]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_update_keeps_the_logprobs_that_it_has_found(cluster: Cluster, ranks: int) -> None:
    policy = Policy.bind(TINY, OPTIM, ParallelConfig(micro_batch_tokens=QUARTERS), GRPO)
    with started(cluster, ranks, policy=policy) as group:
        batch = recorded(None).drop("loss_weights").drop("old_logprobs")
        batch = batch.with_columns({"group": torch.arange(len(batch)) // 4})
        rows = batch.select("loss_mask", "group")
        assert group.policy.update_logprobs(rows).fetch().jagged("old_logprobs").values.isnan().all()  # no update yet
        before = group.policy.logprobs(batch).fetch().jagged("old_logprobs").values
        group.policy.update(batch)
        found = group.policy.update_logprobs(rows).fetch().jagged("old_logprobs").values
        torch.testing.assert_close(found, before, atol=1e-5, rtol=0)
        later = batch.merge(group.policy.logprobs(batch), keep="other")
        group.policy.update(later)  # which has them, so that nothing is kept
        assert group.policy.update_logprobs(rows).fetch().jagged("old_logprobs").values.isnan().all()


def test_tiny_gradients_of_float16_are_kept_on_shards(cluster: Cluster) -> None:
    mask = recorded().jagged("loss_mask")
    batch = recorded().with_columns({"loss_weights": mask.like(mask.values * 1e-6)})
    norms, imitate = list[float](), AlgorithmConfig(loss="cross_entropy")
    for precision in ("float32", "float16"):
        parallel = ParallelConfig(strategy="fsdp2", precision=precision)
        with started(cluster, 2, policy=Policy.bind(TINY, OPTIM, parallel, imitate)) as group:
            norms.append(group.policy.update(batch)["policy/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=0.01)


class Everywhere(Policy):
    """Every rank tells what its update returned."""

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=gather())
    def update_everywhere(self, batch: Batch) -> dict[str, float]:
        return super().update(batch)


def test_ranks_without_rows_take_part(cluster: Cluster) -> None:
    batch = recorded().slice(2, 3)
    algorithm = AlgorithmConfig(loss="clip_cov", options={"cov_share": 0.2, "cov_low": 0.0})
    found: list[dict[str, float]] = []
    ways: list[tuple[int, Strategy]] = [(1, "replicate"), (2, "replicate"), (2, "fsdp2"), (3, "replicate")]
    for ranks, strategy in ways:
        policy = Everywhere.bind(TINY, OPTIM, ParallelConfig(strategy=strategy), algorithm)
        with started(cluster, ranks, policy=policy) as group:
            every = group.policy.update_everywhere(batch)
            assert len(every) == ranks
            assert all(metrics == every[0] for metrics in every)  # those of ranks without rows as well
            found.append(every[0])
            assert torch.isfinite(group.policy.logprobs(batch).fetch().jagged("old_logprobs").values).all()
    assert found[0]["policy/cov_fraction"] > 0
    for metrics in found[1:]:
        assert metrics == pytest.approx(found[0], abs=1e-6)


@pytest.mark.everyday("before0-after0", "before1-after1")
@pytest.mark.parametrize(
    ("before", "after"),
    (((1, "replicate"), (2, "fsdp2")), ((2, "fsdp2"), (1, "replicate")), ((2, "replicate"), (2, "fsdp2"))),
)
def test_a_checkpoint_goes_on_with_other_ranks(
    cluster: Cluster, tmp_path: Path, before: tuple[int, Strategy], after: tuple[int, Strategy]
) -> None:
    batch = recorded()

    def start(ranks: int, strategy: Strategy) -> AbstractContextManager[Any]:
        parallel = ParallelConfig(strategy=strategy)
        workers = {"policy": Policy.bind(TINY, OPTIM, parallel), "critic": Critic.bind(TINY, OPTIM, parallel)}
        return started(cluster, ranks, **workers)

    def update(group: Any) -> list[float]:
        steps = [(group.policy.update(batch)["loss"], group.critic.update(batch)["value/loss"]) for _ in range(3)]
        return [loss for step in steps for loss in step]

    with start(*before) as first:
        update(first)
        for name in ("policy", "critic"):
            first[name].save(str(tmp_path / name))
        expected = update(first)
    with start(*after) as second:
        for name in ("policy", "critic"):
            second[name].load(str(tmp_path / name))
        assert update(second) == pytest.approx(expected, abs=1e-5)


class Apart(Policy):
    """Its ranks write to disks of their own."""

    @endpoint(concurrent=True)
    def write_state(self, path: str) -> dict[str, Any]:
        return super().write_state(f"{path}-{self.ctx.rank}")


def test_a_checkpoint_whose_ranks_share_no_disk_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    policy = Apart.bind(TINY, OPTIM, ParallelConfig(strategy="fsdp2"))
    with (
        started(cluster, 2, policy=policy) as group,
        pytest.raises(EndpointError, match=r"lacks .*safetensors, written on another machine"),
    ):
        group.policy.save(str(tmp_path / "checkpoint"))


@pytest.mark.everyday("fsdp2-lora")
@pytest.mark.parametrize(
    ("cluster", "strategy", "model"),
    [
        pytest.param("local", "replicate", TINY, id="replicate"),
        pytest.param("local", "fsdp2", TINY, id="fsdp2"),
        pytest.param("local", "fsdp2", ADAPTED, id="fsdp2-lora"),
        pytest.param("ray", "fsdp2", ADAPTED, id="ray-fsdp2-lora", marks=pytest.mark.ray),
    ],
    indirect=["cluster"],
)
def test_weights_reach_generators_in_place(
    cluster: Cluster, tmp_path: Path, strategy: Strategy, model: ModelConfig
) -> None:
    """Colocated by reference or gathered, split by sending, and saved: all are the weights that were trained."""
    prompts = Batch(
        {
            "prompt_tokens": Jagged.from_rows([torch.tensor([5, 14, 6, 15]), torch.tensor([9, 15]), torch.tensor([4])]),
            "seed": torch.arange(6).view(3, 2),
            "group": torch.arange(3),
        }
    )
    sampling = SamplingParams(max_new_tokens=8, n=2)
    policy = Policy.bind(model, OptimConfig(lr=1e-2), ParallelConfig(strategy=strategy))
    with (
        started(cluster, 2, policy=policy, generator=Generator.bind(model)) as both,
        started(cluster, 1, split=Generator.bind(TINY)) as other,
    ):
        syncs = [ColocatedSync(both.generator), StreamedSync(both.policy, [other.split])]
        for version in range(1, 3):
            both.policy.update(recorded(seed=version))
            for sync in syncs:
                sync.sync(version)
            out = both.generator.generate(prompts, sampling)
            sent = other.split.generate(prompts, sampling)
            trained = both.policy.logprobs(out).fetch().jagged("old_logprobs").values
            out, sent = out.fetch(), sent.fetch()
            assert torch.allclose(out.jagged("rollout_logprobs").values, trained, atol=1e-5)
            assert torch.equal(out.jagged("tokens").values, sent.jagged("tokens").values)
            assert out.jagged("versions").values.max() == version
            both.policy.save_pretrained(str(tmp_path / f"v{version}"))
            saved = AutoModelForCausalLM.from_pretrained(tmp_path / f"v{version}")
            alone = torch.cat([oracle_logprobs(saved, row) for row in out.jagged("tokens").unbind()])
            assert torch.allclose(alone * out.jagged("loss_mask").values, trained, atol=1e-5)
