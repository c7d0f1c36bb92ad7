"""Weights that a generator copies from the policy's own tensors on the device of both, in two processes.

The tests run on CPUs, whose tensors torch shares between processes by the same functions. No GPU has run this
yet: see the stage ``ipc`` of ``bench.gpu``.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, rebuild_tensor

from podium.data import Batch, Jagged
from podium.errors import EndpointError, WorkerDied
from podium.models import ModelConfig
from podium.models.buckets import checksum
from podium.rollout.engines import EngineConfig
from podium.rollout.sampling import SamplingParams
from podium.runtime import Cluster, endpoint
from podium.telemetry import Note, subscribe
from podium.training import OptimConfig, ParallelConfig
from podium.workers import Generator, StreamedSync
from podium.workers.weight_sync.on_device import Lent, Loan, Site, _on, lend, open_loan, route, site_of
from tests.unit.training.near import GPU, Borrower, Lender
from tests.unit.workers.tiny import ADAPTED, TINY, recorded

OPTIM = OptimConfig(lr=1e-2)
SAMPLING = SamplingParams(max_new_tokens=4)
PROMPTS = Batch(
    {
        "prompt_tokens": Jagged.from_rows([torch.tensor([5, 14, 6, 15]), torch.tensor([9, 15])]),
        "seed": torch.arange(2),
        "group": torch.arange(2),
    }
)


class Liar(Lender):
    """It says that one tensor has another checksum than it has."""

    @endpoint()
    def lend_weights(self, readers: Any) -> Lent:
        lent = super().lend_weights(readers)
        return Lent([Loan(loan.handles, [loan.sums[0] ^ 1, *loan.sums[1:]]) for loan in lent.loans])


class Miser(Lender):
    """Its driver gives no handles."""

    @endpoint()
    def lend_weights(self, readers: Any) -> Lent:
        return Lent([], "RuntimeError: CUDA error: operation not supported" if readers else "")


class Stranger(Borrower):
    """Its process cannot open what others lend."""

    @endpoint(concurrent=True)
    def open_weights(self, loans: Any) -> str:
        return super().open_weights([Loan(_broken(), []) for _ in loans])


def _broken() -> bytes:
    """A handle of what nobody has."""
    return pickle.dumps([(open, ("/nowhere",))])


class Group:
    """A policy and generators in processes of their own, with what telemetry says of their weight syncs."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.notes: list[str] = []
        self.started: list[Any] = []

    def start(self, policy: Any, *generators: Any) -> tuple[Any, list[Any], StreamedSync]:
        handles = [self.cluster.start(one, self.cluster.pool([1])) for one in (policy, *generators)]
        self.started += handles
        sync = StreamedSync(handles[0], handles[1:], bucket_bytes=3000)
        sync.init()
        return handles[0], handles[1:], sync


@pytest.fixture
def group(preloaded: Cluster) -> Iterator[Group]:
    made = Group(preloaded)
    stop = subscribe(lambda event: made.notes.append(event.text) if isinstance(event, Note) else None)
    yield made
    stop()
    for handle in made.started:
        handle.group.close()


def check(policy: Any, generator: Any, version: int) -> None:
    """What the generator draws is drawn by the policy as it is now."""
    out = generator.generate(PROMPTS, SAMPLING).fetch()
    trained = policy.logprobs(out).fetch().jagged("old_logprobs").values
    assert (out.jagged("rollout_logprobs").values - trained).abs().max() < 1e-5
    assert set(out.jagged("versions").values[out.jagged("loss_mask").values].tolist()) == {version}


@pytest.mark.everyday("lora")
@pytest.mark.parametrize("model", [TINY, ADAPTED], ids=["plain", "lora"])
def test_generators_on_the_policys_device_copy_its_weights_there_and_keep_no_handle(
    group: Group, model: ModelConfig
) -> None:
    engine = EngineConfig(name="native")
    readers = [Borrower.bind(TINY, engine), Borrower.bind(TINY, engine), Generator.bind(TINY, engine)]
    policy, generators, sync = group.start(Lender.bind(model, OPTIM), *readers)
    for version in (1, 2, 3):
        policy.update(recorded(seed=version))
        sync.sync(version)
        for generator in generators:
            check(policy, generator, version)
        assert policy.lent_count() == [0]
    assert [generator.holds() for generator in generators[:2]] == [[(3, False)]] * 2
    (note,) = [note for note in group.notes if note.startswith("weight sync")]
    assert "2 of 3 generators copy the policy's weights on their device" in note
    assert "1 get them through host memory: its device shares no tensors between processes" in note


def test_weights_that_arrive_damaged_come_through_host_memory_in_the_same_sync(group: Group) -> None:
    policy, (generator,), sync = group.start(Liar.bind(TINY, OPTIM), Borrower.bind(TINY))
    for version in (1, 2):
        policy.update(recorded(seed=version))
        sync.sync(version)
        check(policy, generator, version)
    assert (policy.lent_count(), generator.holds()) == ([0], [(1, False)])
    damaged = "model.embed_tokens.weight arrived damaged on the device"
    lent, noticed, avoided = [note for note in group.notes if note.startswith("weight sync")]
    assert "1 of 1 generator copies" in lent
    assert damaged in noticed
    assert f"1 get them through host memory: {damaged}" in avoided


class Mortal(Borrower):
    """Its process ends while it copies."""

    @endpoint(concurrent=True)
    def copy_opened(self, version: int) -> list[str]:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().copy_opened(version)


class Stillborn(Borrower):
    """Its process ends before it opens what was lent."""

    @endpoint(concurrent=True)
    def open_weights(self, loans: Any) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().open_weights(loans)


@pytest.mark.parametrize("lost", [Mortal, Stillborn])
def test_a_generator_that_dies_during_a_loan_ends_it(group: Group, lost: type[Borrower]) -> None:
    """The sync fails, no handle is kept, and the other generator draws no token of half the weights."""
    policy, (_, other), sync = group.start(Lender.bind(TINY, OPTIM), lost.bind(TINY), Borrower.bind(TINY))
    with pytest.raises(WorkerDied):
        sync.sync(1)
    assert policy.lent_count() == [0]
    assert [held for _, held in other.holds()] == [False]
    if lost is Mortal:
        with pytest.raises(EndpointError, match="version 1 arrived only in part"):
            other.generate(PROMPTS, SAMPLING)
    sync.sync(1, [other])
    check(policy, other, 1)


@pytest.mark.everyday("not lent", "not opened")
@pytest.mark.parametrize(
    ("policy", "generator", "tries", "why"),
    [
        (Miser.bind(TINY, OPTIM), Borrower.bind(TINY), 0, "CUDA error: operation not supported"),
        (Lender.bind(TINY, OPTIM), Stranger.bind(TINY), 1, "FileNotFoundError"),
        (Lender.bind(TINY, OPTIM, ParallelConfig(offload="all")), Borrower.bind(TINY), 0, "parallel.offload"),
    ],
    ids=["not lent", "not opened", "offloaded"],
)
def test_weights_that_cannot_be_lent_go_through_host_memory(
    group: Group, policy: Any, generator: Any, tries: int, why: str
) -> None:
    """The way is chosen before anything is sent, is said once, and what was refused is not tried again."""
    trained, (drawing,), sync = group.start(policy, generator)
    for version in (1, 2):
        trained.update(recorded(seed=version))
        sync.sync(version)
    check(trained, drawing, 2)
    (note,) = [note for note in group.notes if note.startswith("weight sync")]
    assert "0 of 1 generator copy" in note
    assert why in note
    assert drawing.holds() == [(tries, False)]


def test_a_loan_is_of_the_tensors_as_they_are_and_leaves_them_alone() -> None:
    whole = torch.arange(24.0).view(4, 6)
    tensors = [whole, whole[1:3, 2:], torch.ones(3, dtype=torch.bfloat16), torch.tensor(7)]
    before = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    lent, kept = lend(tensors, 1)
    (loan,) = lent.loans
    assert [tensor.untyped_storage().data_ptr() for tensor in tensors] == before
    assert all(torch.equal(one, other) for one, other in zip(kept, tensors, strict=True))
    assert loan.sums == [checksum(tensor) for tensor in tensors]
    found = open_loan(loan, torch.device("cpu"))
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))
    assert lend(tensors, 0) == (Lent([]), [])


def test_a_handle_is_opened_under_the_readers_own_index_of_the_device() -> None:
    arguments: tuple[Any, ...] = (Tensor, (2,), (1,), 0, object, torch.float32, 3, b"handle", 8, 0, False)
    found = _on(rebuild_cuda_tensor, arguments, torch.device("cuda:0"))
    assert found == (*arguments[:6], 0, *arguments[7:])
    assert _on(rebuild_tensor, arguments, torch.device("cpu")) == arguments


@pytest.mark.parametrize(
    ("lenders", "readers", "found"),
    [
        ([(GPU, 1)], [(GPU, 2)], [0]),
        ([("GPU-0", 1), (GPU, 2)], [(GPU, 3), ("GPU-0", 4)], [1, 0]),
        ([("GPU-0", 1)], [(GPU, 2)], "it is on another device"),
        ([(GPU, 1)], [(GPU, 2), ("", 3)], "its device shares no tensors between processes"),
        ([(GPU, 1)], [(GPU, 1)], "it is in the policy's own process"),
        ([(GPU, 1, "sharded")], [(GPU, 2)], "sharded"),
        ([(GPU, 1, "sharded"), (GPU, 2)], [(GPU, 3)], [1]),
    ],
)
def test_the_rank_on_a_readers_device_lends(lenders: Any, readers: Any, found: list[int] | str) -> None:
    assert route([Site(*one) for one in lenders], [Site(*one) for one in readers]) == found


def test_a_cpu_is_no_device_that_shares_tensors() -> None:
    assert site_of(torch.device("cpu"), "") == Site("", os.getpid(), "")
