"""Contract: references stand for tensors that stay with their workers, and free them when nobody needs them."""

import asyncio
import gc
import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from podium.data import Batch, TensorRef
from podium.errors import CallCancelled, ConfigError, DataError, EndpointError, RefLostError, WorkerDied
from podium.runtime import Cluster, Handle
from podium_testing.target import need, refuses, started, wait_for
from podium_testing.values import LARGE, make_batch, same_batch, same_tensor, tensors
from podium_testing.workers import Stash

__all__ = ["ReferenceContract"]

SOON_S = 60.0


def batch(rows: int) -> Batch:
    """Return a batch with a column of each kind, one of them large. Row i is made of i."""
    x = torch.arange(float(rows))[:, None].repeat(1, 2000)
    return make_batch([row % 7 for row in range(rows)]).with_columns(x=x)


def soon(condition: Callable[[], bool]) -> bool:
    """Return whether ``condition`` comes true. The news that nobody needs a reference travels behind the calls."""
    return wait_for(condition, SOON_S)


def read_kept_bytes(stash: Handle[Stash]) -> int:
    """Return the bytes that all ranks keep."""
    gc.collect()  # an error keeps the frames it came through, and in them the arguments of a worker in this process
    return sum(usage.nbytes for usage in stash.group.stores() if usage is not None)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


def _total(worker: Stash, value: Tensor) -> float:
    return float(value.sum())


class ReferenceContract:
    stash = started(Stash.bind(), 2, name="stash", distributed=False)

    def test_a_reference_tells_what_it_stands_for(self, stash: Handle[Stash]) -> None:
        refs: list[Any] = stash.make(30, 500)
        for rank, ref in enumerate(refs):
            assert type(ref) is TensorRef
            assert (ref.shape, ref.dtype, ref.nbytes, len(ref)) == ((30, 500), torch.float32, 60_000, 30)
            assert f"stash.make of rank {rank}" in ref.places[0]
            assert torch.equal(ref.get(), torch.full((30, 500), float(rank)))

    @pytest.mark.parametrize("name", sorted(tensors()))
    def test_tensors_of_every_kind_come_back_equal(self, stash: Handle[Stash], name: str) -> None:
        sent = tensors()[name]
        ref: Any = stash.put(sent)
        assert same_tensor(ref.get(), sent)
        through: Any = stash.put(ref)
        assert same_tensor(through.get(), sent)

    def test_what_is_fetched_is_ones_own(self, stash: Handle[Stash]) -> None:
        ref: Any = stash.put(torch.ones(LARGE))
        first, second = ref.get(), ref.get()
        first += 1
        assert torch.equal(second, torch.ones(LARGE))
        assert torch.equal(ref.get(), torch.ones(LARGE))

    def test_fetching_can_be_awaited_and_begun_early(self, stash: Handle[Stash]) -> None:
        ref: Any = stash.put(torch.arange(LARGE))

        async def wait() -> Tensor:
            return await ref.prefetch()

        assert torch.equal(asyncio.run(wait()), torch.arange(LARGE))

    def test_using_one_as_a_tensor_says_what_to_do(self, stash: Handle[Stash]) -> None:
        ref: Any = stash.put(torch.ones(LARGE))
        refuses(DataError, r"\.mean of a reference.*get\(\)", getattr, ref, "mean")
        with pytest.raises(DataError, match=r"fetch"):
            stash.double(batch(5)).dense("x")
        refuses(TypeError, r"argument or a result", pickle.dumps, ref)

    def test_row_operations_on_references_and_mixed_batches(self, stash: Handle[Stash]) -> None:
        all_rows = batch(40)
        far = stash.balanced(all_rows)
        assert same_batch(far, all_rows)
        assert same_batch(far.slice(3, 29).take([5, 0, 5, 20]), all_rows.slice(3, 29).take([5, 0, 5, 20]))
        assert same_batch(
            Batch.concat([far.slice(30, 40), all_rows.slice(0, 8), far.take([1])]),
            all_rows.take([*range(30, 40), *range(8), 1]),
        )
        mixed = all_rows.merge(far.select("tokens"), keep="other")
        assert same_batch(stash.values(mixed.take([9, 3, 3])), all_rows.take([9, 3, 3]))
        assert same_batch(far.slice(4, 4), all_rows.slice(4, 4))

    def test_shards_balanced_shards_and_padding(self, stash: Handle[Stash]) -> None:
        all_rows = batch(41)
        far = stash.double(all_rows)
        doubled = all_rows.with_columns(x=all_rows.dense("x") * 2)
        assert same_batch(far, doubled)
        assert same_batch(stash.balanced(far), doubled)
        assert same_batch(stash.padded(far), doubled)
        assert same_batch(stash.values(far), doubled)
        assert far.meta == all_rows.meta
        assert same_batch(
            stash.double(far.slice(0, 1)), doubled.slice(0, 1).with_columns(x=all_rows.dense("x")[:1] * 4)
        )

    def test_a_call_as_an_argument_passes_references_on(self, stash: Handle[Stash]) -> None:
        first = stash.double.submit(batch(20))
        second = stash.double.submit(first.arg())
        assert torch.equal(second.result().fetch("x").dense("x"), batch(20).dense("x") * 4)

    def test_references_go_to_and_come_from_chosen_ranks(self, stash: Handle[Stash]) -> None:
        (ref,) = stash.group.on(1).make(30, 500)
        assert type(ref) is TensorRef
        assert "of rank 1" in ref.places[0]
        assert stash.group.on(0).total(ref) == [15_000.0]
        assert stash.group.function(_total, on=0)(ref) == [15_000.0]

    def test_what_is_put_is_passed_on_by_reference_and_freed_with_the_last_one(
        self, cluster: Cluster, stash: Handle[Stash]
    ) -> None:
        all_rows = batch(60)
        put = cluster.put({"batch": all_rows, "also": [all_rows.dense("x"), torch.ones(3)], "note": "as it is"})
        all_rows.dense("x").zero_()
        far, again = put["batch"], put["also"][0]
        assert type(far["x"]) is type(again) is TensorRef
        assert put["note"] == "as it is"
        assert far["x"].places == ("the controller",)
        assert cluster.put(far)["x"] is far["x"], "references stay what they are"
        other = cluster.start(Stash.bind(), cluster.pool([2]), name="other", distributed=False)
        for group in (stash, other, stash.group.on(1)):
            assert same_batch(group.values(far.take([7, 0, 7])), batch(60).take([7, 0, 7]))
            assert same_batch(group.double(far), batch(60).with_columns(x=batch(60).dense("x") * 2))
        assert stash.overwrite(again) == [float(batch(60).dense("x").sum()) + (at + 1) * 120_000 for at in range(2)]
        assert torch.equal(again.get(), batch(60).dense("x"))
        for nothing in ("text", [1, 2], {"a": 1}):
            refuses(ConfigError, r"put\(\): .* holds no tensors", cluster.put, nothing)

    def test_a_group_can_return_references_by_default(self, cluster: Cluster) -> None:
        stash = cluster.start(Stash.bind(), cluster.pool([1]), name="by-default", distributed=False, returns="ref")
        assert type(stash.values(batch(30))["x"]) is TensorRef
        assert stash.total(stash.make(10, 1000)[0]) == [0.0]

    @pytest.mark.parametrize("size", [4, LARGE])
    def test_a_worker_finds_a_tensor_and_may_write_to_it(self, stash: Handle[Stash], size: int) -> None:
        ref: Any = stash.put(torch.ones(size))
        for _ in range(2):
            assert stash.overwrite(ref) == [2.0 * size, 3.0 * size]
        assert stash.total(ref) == [size] * 2
        assert torch.equal(ref.get(), torch.ones(size))

    def test_references_anywhere_in_an_argument(self, stash: Handle[Stash]) -> None:
        ref: Any = stash.put(torch.ones(LARGE))
        assert stash.kinds({"a": ref, "b": [ref], "c": torch.ones(1)}) == {"a": "Tensor", "b": "list", "c": "Tensor"}

    def test_a_worker_can_keep_references_and_pass_them_on(self, stash: Handle[Stash]) -> None:
        inner: Any = stash.put({"a": torch.ones(LARGE), "b": [torch.zeros(3)]})
        outer: Any = stash.hold([inner["a"], inner["a"][:10]])
        del inner
        assert torch.equal(outer[0].get(), torch.ones(LARGE))
        assert stash.total(outer[1]) == [10.0, 10.0]
        stash.drop()
        held_reference: Any = stash.hold(stash.make(100, 1000)[1])
        del held_reference, outer
        stash.drop.submit()

    def test_the_last_reference_frees_the_memory(self, stash: Handle[Stash]) -> None:
        assert soon(lambda: read_kept_bytes(stash) == 0)
        ref: Any = stash.make(LARGE, 1)[1]
        part = ref[5:10]
        if read_kept_bytes(stash):  # a backend whose blocks travel with its messages keeps nothing in a worker
            del ref
            assert read_kept_bytes(stash) >= 4 * LARGE, "a part keeps the whole"
        assert torch.equal(part.get(), torch.ones(5, 1))
        ref = None
        del part
        assert soon(lambda: read_kept_bytes(stash) == 0)

    def test_a_reference_kept_by_a_worker_alone_lives_until_it_lets_go(self, stash: Handle[Stash]) -> None:
        stash.drop()
        ref: Any = stash.hold(stash.make(LARGE, 1)[1])
        del ref
        assert stash.held_total() == LARGE
        stash.drop()
        assert soon(lambda: read_kept_bytes(stash) == 0)

    def test_a_look_at_what_is_kept_takes_nothing_away(self, stash: Handle[Stash]) -> None:
        """Each result looks at what its worker keeps. What only the worker itself refers to must outlive that."""
        maker: Any = stash.group.on(1)
        ref, other = maker.hold(maker.make(LARGE, 1)[0]), maker.make(LARGE, 1)[0]
        both = read_kept_bytes(stash)
        del ref, other
        assert soon(lambda: 2 * read_kept_bytes(stash) <= both), "nobody has the other one"
        maker.make(LARGE, 1)
        assert maker.held_total() == LARGE
        stash.drop()
        assert soon(lambda: read_kept_bytes(stash) == 0)

    def test_failed_and_cancelled_calls_leak_nothing(self, cluster: Cluster, stash: Handle[Stash]) -> None:
        need(cluster, "concurrent")
        ref: Any = stash.make(LARGE, 1)[0]
        with pytest.raises(EndpointError, match="as asked"):
            stash.refuse(ref)
        waiting = stash.dawdle.submit([ref], 60.0)
        assert waiting.cancel()
        with pytest.raises(CallCancelled):
            waiting.result()
        del ref, waiting
        assert soon(lambda: read_kept_bytes(stash) == 0)

    def test_a_reader_that_is_killed_holds_nothing(self, cluster: Cluster, stash: Handle[Stash]) -> None:
        need(cluster, "processes")
        reader = cluster.start(Stash.bind(), cluster.pool([1]), name="reader", distributed=False)
        ref: Any = stash.make(LARGE, 1)[1]
        held_reference: Any = reader.hold(ref)
        call = reader.dawdle.submit(ref, 60.0)
        os.kill(reader.group.pids[0], signal.SIGKILL)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        with pytest.raises(WorkerDied):
            call.result()
        assert torch.equal(ref.get(), torch.ones(LARGE, 1))
        del ref, held_reference, call
        assert soon(lambda: read_kept_bytes(stash) == 0)

    def test_what_a_dead_owner_made_is_there_or_its_loss_is_named(self, cluster: Cluster, stash: Handle[Stash]) -> None:
        need(cluster, "processes")
        owner = cluster.start(Stash.bind(), cluster.pool([1]), name="owner", distributed=False)
        ref: Any = owner.make(LARGE, 1)[0]
        pid: int = owner.group.pids[0]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            owner.make(1, 1)
        for read in (ref.get, lambda: stash.total(ref)):
            try:
                got = read()
            except RefLostError as error:
                assert "owner.make of rank 0" in str(error)
            except EndpointError as error:
                assert isinstance(error.__cause__, RefLostError)
                assert "owner.make of rank 0" in str(error)
            else:
                assert got == [0.0, 0.0] if isinstance(got, list) else torch.equal(got, torch.zeros(LARGE, 1))
