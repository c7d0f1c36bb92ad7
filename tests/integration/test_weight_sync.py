"""Weights from processes to processes: shards, buckets by reference, while completions are drawn, and after deaths."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from podium import Cluster, connect
from podium.data import Batch, Jagged
from podium.errors import DataError, EndpointError, PodiumError, WorkerDied
from podium.models import ModelConfig
from podium.rollout.sampling import SamplingParams
from podium.runtime import Bound, endpoint
from podium.trainer import PRELOAD
from podium.training import OptimConfig, ParallelConfig
from podium.workers import Generator, Policy, StreamedSync
from podium_native.decoder import Decoder
from tests.integration.training import slots
from tests.unit.workers.tiny import ADAPTED, TINY, recorded

BUCKET = 3000
OPTIM = OptimConfig(lr=1e-2)
FSDP2 = ParallelConfig(strategy="fsdp2")
OTHER = replace(TINY, seed=5)  # generators start from other weights than the policy's
LONG = SamplingParams(max_new_tokens=40, n=4)
PROMPTS = Batch(
    {
        "prompt_tokens": Jagged.from_rows([torch.tensor([5, 14, 6, 15]), torch.tensor([9, 15]), torch.tensor([4])]),
        "seed": torch.arange(12).view(3, 4),
        "group": torch.arange(3),
    }
)


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
def started(
    cluster: Cluster, policy: Bound[Any], ranks: int, generator: Bound[Any], generators: int, **how: Any
) -> Iterator[tuple[Any, Any, StreamedSync]]:
    with ExitStack() as stack:
        handles: list[Any] = []
        for worker, count in ((policy, ranks), (generator, generators)):
            handles.append(cluster.start(worker, stack.enter_context(slots(cluster, count))))
            stack.callback(handles[-1].group.close)
        sync = StreamedSync(handles[0], handles[1:], bucket_bytes=BUCKET, **how)
        sync.init()
        yield handles[0], handles[1], sync


def check(policy: Any, generator: Any, version: int) -> None:
    """What is drawn now is drawn by the policy as it is now, and says so."""
    out = generator.generate(PROMPTS, LONG).fetch()
    trained = policy.logprobs(out).fetch().jagged("old_logprobs").values
    assert (out.jagged("rollout_logprobs").values - trained).abs().max() < 1e-5
    assert set(out.jagged("versions").values[out.jagged("loss_mask").values].tolist()) == {version}


@pytest.mark.everyday("whole", "fsdp2-lora-delta")
@pytest.mark.parametrize(
    ("cluster", "model", "parallel", "ranks", "delta"),
    [
        pytest.param("local", TINY, None, 1, False, id="whole"),
        pytest.param("local", TINY, FSDP2, 2, False, id="fsdp2"),
        pytest.param("local", ADAPTED, FSDP2, 2, False, id="fsdp2-lora"),
        pytest.param("local", ADAPTED, FSDP2, 2, True, id="fsdp2-lora-delta"),
        pytest.param("ray", ADAPTED, FSDP2, 2, True, id="ray-fsdp2-lora-delta", marks=pytest.mark.ray),
    ],
    indirect=["cluster"],
)
def test_after_each_sync_generators_draw_from_the_policy(
    cluster: Cluster, model: ModelConfig, parallel: ParallelConfig | None, ranks: int, delta: bool
) -> None:
    policy = Policy.bind(model, OPTIM, parallel)
    with started(cluster, policy, ranks, Generator.bind(OTHER), 2, delta=delta) as (trained, generator, sync):
        for version in range(3):
            sync.sync(version)
            check(trained, generator, version)
            trained.update(recorded(seed=version))


class Slow(Generator):
    """At its sixth token it waits for new weights; says how far it is."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self.count = 0
        decode = Decoder.decode

        def slowly(decoder: Decoder, *args: Any) -> Any:
            self.count += 1
            while self.count == 6 and not self._ready_engine().gate.closed:
                time.sleep(0.001)
            return decode(decoder, *args)

        setattr(Decoder, "decode", slowly)  # noqa: B010 - in a process of its own

    @endpoint(concurrent=True)
    def drawn_ids(self) -> int:
        return self.count


def test_weights_are_synced_while_completions_are_drawn(cluster: Cluster) -> None:
    """Tokens before carry the old version and its log-probabilities, those after the new, on each of two ranks."""
    with started(cluster, Policy.bind(TINY, OPTIM), 1, Slow.bind(OTHER), 2) as (policy, generator, sync):
        sync.sync(1)
        policy.update(recorded())
        drawing = generator.generate.submit(PROMPTS, LONG)
        while min(generator.drawn_ids()) < 6:
            time.sleep(0.01)
        sync.sync(2)
        out = drawing.result().fetch()
        old, new = Policy(TINY).logprobs(out), policy.logprobs(out).fetch()
    drawn, versions = out.jagged("rollout_logprobs").values, out.jagged("versions").values
    for version, trained in ((1, old), (2, new)):
        own = out.jagged("loss_mask").values & (versions == version)
        assert own.sum() > 12
        assert (drawn - trained.jagged("old_logprobs").values)[own].abs().max() < 1e-5
    rows = out.jagged("versions").unbind()
    masks = out.jagged("loss_mask").unbind()
    assert all(row[mask].diff().min() >= 0 for row, mask in zip(rows, masks, strict=True))
    assert any(len(row[mask].unique()) == 2 for row, mask in zip(rows, masks, strict=True))


@pytest.mark.parametrize("delta", [False, True], ids=["full", "delta"])
def test_a_generator_that_was_restarted_gets_all_weights(cluster: Cluster, delta: bool) -> None:
    with started(cluster, Policy.bind(TINY, OPTIM), 1, Generator.bind(OTHER), 2, delta=delta) as parts:
        policy, generator, sync = parts
        sync.sync(1)
        assert not sync.is_stale(1)
        generator.group.restart()
        assert sync.is_stale(1)
        sync.sync(1)
        assert not sync.is_stale(1)
        check(policy, generator, 1)


class Dying(Generator):
    """Its second rank ends at the third bucket of version 2, unless it was restarted before."""

    @endpoint(concurrent=True, readonly=True)
    def receive_weights(self, version: int, index: int, tensors: Any, sums: Any = None) -> Any:
        self.first = getattr(self, "first", version)
        if self.first == 1 and version == 2 and index == 2 and self.ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().receive_weights(version, index, tensors, sums)


def test_a_generator_that_dies_midway_gets_all_weights_after_its_restart(cluster: Cluster) -> None:
    with started(cluster, Policy.bind(TINY, OPTIM), 1, Dying.bind(OTHER), 2, delta=True) as parts:
        policy, generator, sync = parts
        sync.sync(1)
        policy.update(recorded())
        with pytest.raises(WorkerDied, match=r"rank 1.*SIGKILL"):
            sync.sync(2)
        with pytest.raises(PodiumError):
            sync.sync(2)  # the group is broken, and says so
        generator.group.restart()
        sync.sync(2)
        check(policy, generator, 2)


class Failing(Policy):
    """Cannot gather its fourth bucket, once."""

    @endpoint(collect=Policy.weight_bucket.spec.collect, returns="ref")
    def weight_bucket(self, index: int, bucket_bytes: int, known: Any = None) -> Any:
        if index == 3 and not getattr(self, "failed", False):
            self.failed = True
            raise DataError("the third bucket is lost")
        return super().weight_bucket(index, bucket_bytes, known)


def test_who_waits_at_the_gate_hears_that_a_sync_failed(cluster: Cluster) -> None:
    with started(cluster, Failing.bind(TINY, OPTIM), 1, Slow.bind(OTHER), 1) as (policy, generator, sync):
        drawing = generator.generate.submit(PROMPTS, LONG)
        while min(generator.drawn_ids()) < 6:
            time.sleep(0.01)
        with pytest.raises(EndpointError, match="the third bucket is lost"):
            sync.sync(1)
        with pytest.raises(EndpointError, match=r"version 1 arrived only in part \(EndpointError.* sync again"):
            drawing.result()
        sync.sync(1)
        check(policy, generator, 1)


class Late(Generator):
    """Waits with the first bucket of version 2 until it is told to go on."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self.waits, self.told = threading.Event(), threading.Event()

    @endpoint(concurrent=True, readonly=True)
    def receive_weights(self, version: int, index: int, tensors: Any, sums: Any = None) -> Any:
        if (version, index) == (2, 0):
            self.waits.set()
            self.told.wait(60.0)
        return super().receive_weights(version, index, tensors, sums)

    @endpoint(concurrent=True)
    def wait_for_version_2(self) -> bool:
        return self.waits.wait(60.0)

    @endpoint(concurrent=True)
    def go_on(self) -> None:
        self.told.set()


def test_weights_that_are_updated_while_they_are_read_are_not_drawn_from(cluster: Cluster) -> None:
    with started(cluster, Policy.bind(TINY, OPTIM), 1, Late.bind(OTHER), 1) as (policy, generator, sync):
        sync.sync(1)
        place = policy.weight_manifest().place
        assert place, "they are read where they are"
        with ThreadPoolExecutor(1) as pool:
            syncing = pool.submit(sync.sync, 2)
            assert generator.wait_for_version_2() == [True]
            policy.update(recorded())
            generator.go_on()
            with pytest.raises(DataError, match="updated while its weights were sent as version 2"):
                syncing.result()
        with pytest.raises(EndpointError, match="arrived only in part"):
            generator.generate(PROMPTS, LONG)
        sync.sync(2)
        check(policy, generator, 2)
        assert policy.weight_manifest().place == place, "and did not move again"


def test_a_policy_that_was_restarted_shares_its_new_weights(cluster: Cluster) -> None:
    with started(cluster, Policy.bind(TINY, OPTIM), 1, Generator.bind(OTHER), 1) as (policy, generator, sync):
        sync.sync(1)
        policy.update(recorded())
        policy.group.restart()
        policy.update(recorded(seed=3))
        sync.sync(2)
        check(policy, generator, 2)


def test_replicas_share_one_sync(cluster: Cluster) -> None:
    policy = cluster.start(Policy.bind(TINY, OPTIM), cluster.pool([1]))
    replicas = cluster.start_replicas(Generator.bind(OTHER), 2)
    sync = StreamedSync(policy, list(replicas), bucket_bytes=BUCKET)
    try:
        sync.init()
        sync.sync(1)
        replicas.restart(1)
        assert sync.is_stale(1)
        sync.sync(1)
        for replica in replicas:
            check(policy, replica, 1)
    finally:
        replicas.close()
        policy.group.close()
