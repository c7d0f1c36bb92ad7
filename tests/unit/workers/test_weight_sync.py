"""Weight sync without processes: what is cut, what is checked, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import podium
from podium.data import Batch, Jagged
from podium.errors import ConfigError, DataError, EndpointError, GenerationError
from podium.models import LoraConfig
from podium.models.buckets import Piece, WeightInfo, WeightManifest, checksum, cut
from podium.models.whole_weights import WholeWeights, full_weights
from podium.rollout.engines import EngineConfig
from podium.rollout.sampling import SamplingParams
from podium.runtime import Cluster, colocate, endpoint
from podium.telemetry import Note, subscribe
from podium.training import OptimConfig
from podium.workers import ColocatedSync, Generator, Policy, StreamedSync, WeightSync
from podium.workers.weight_sync.on_device import Site
from podium.workers.weight_sync.receiver import WeightReceiver
from podium_native import NativeEngine
from tests.unit.models.test_loading import EXPERTS, UNTIED
from tests.unit.workers.tiny import ADAPTED, SHAPE, TINY, recorded

OPTIM = OptimConfig(lr=1e-2)
BUCKET = 3000  # bytes: several tensors in some buckets, several buckets for some tensors
SAMPLING = SamplingParams(max_new_tokens=8, n=2)
PROMPTS = Batch(
    {
        "prompt_tokens": Jagged.from_rows([torch.tensor([5, 14, 6, 15]), torch.tensor([9, 15])]),
        "seed": torch.arange(4).view(2, 2),
        "group": torch.arange(2),
    }
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with podium.connect("inline") as running:
        yield running


class Pair:
    """A policy and a generator, apart or together, and the weight sync between them."""

    def __init__(self, cluster: Cluster, kind: str, model: Any = TINY, **engine: Any) -> None:
        generator = Generator.bind(replace(model, seed=5), EngineConfig(**engine))
        if kind == "colocated":
            both = cluster.start(colocate(actor=Policy.bind(model, OPTIM), sampler=generator))  # any name will do
            self.policy, self.generator = both.actor, both.sampler
            self.sync: WeightSync = ColocatedSync(self.generator)
        else:
            self.policy = cluster.start(Policy.bind(model, OPTIM))
            self.generator = cluster.start(generator)
            delta = kind == "delta"
            self.sync = StreamedSync(self.policy, [self.generator], bucket_bytes=BUCKET, delta=delta)
        self.sync.init()

    def close(self) -> None:
        self.sync.close()
        self.generator.group.close()
        self.policy.group.close()

    def check(self, version: int, atol: float = 1e-5) -> None:
        """What is drawn now is drawn by the policy as it is now, and says so."""
        out = self.generator.generate(PROMPTS, SAMPLING).fetch()
        trained = self.policy.logprobs(out).fetch().jagged("old_logprobs").values
        assert (out.jagged("rollout_logprobs").values - trained).abs().max() < atol
        mask = out.jagged("loss_mask").values
        assert set(out.jagged("versions").values[mask].tolist()) == {version}


@pytest.fixture
def make(cluster: Cluster) -> Iterator[Any]:
    pairs: list[Pair] = []

    def made(kind: str, model: Any = TINY, **engine: Any) -> Pair:
        pairs.append(Pair(cluster, kind, model, **engine))
        return pairs[-1]

    yield made
    for pair in pairs:
        pair.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that generators receive, in order."""
    names: list[str] = []
    copy = WeightReceiver._copy

    def noting(self: WeightReceiver, engine: Any, piece: Piece, values: Any, expected: Any) -> bool:
        names.extend([piece.name] if values is not None else [])
        return copy(self, engine, piece, values, expected)

    monkeypatch.setattr(WeightReceiver, "_copy", noting)
    return names


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of each tensor that generators receive."""
    counts: dict[str, int] = {}
    copy = WeightReceiver._copy

    def counting(self: WeightReceiver, engine: Any, piece: Piece, values: Any, expected: Any) -> bool:
        counts[piece.name] = counts.get(piece.name, 0) + (0 if values is None else values.nbytes)
        return copy(self, engine, piece, values, expected)

    monkeypatch.setattr(WeightReceiver, "_copy", counting)
    return counts


def test_a_generator_among_several_policies_is_refused(cluster: Cluster) -> None:
    policies = {name: Policy.bind(TINY, OPTIM) for name in ("first_policy", "second_policy")}
    group = cluster.start(colocate(**policies, generator=Generator.bind(TINY)))
    with pytest.raises(
        EndpointError, match="first_policy and second_policy have it: put one of them into other proces"
    ):
        group.generator.refresh(1)
    for handle in group.values():
        handle.group.close()


KINDS = ["colocated", "streamed", "delta"]


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["native", "transformers"])
@pytest.mark.parametrize("model", [TINY, ADAPTED], ids=["plain", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_each_sync_the_generator_draws_from_the_policy(make: Any, kind: str, model: Any, name: str) -> None:
    pair = make(kind, model, name=name)
    for version in (0, 1, 5):
        pair.sync.sync(version)
        pair.check(version)
        pair.policy.update(recorded(seed=version))


@pytest.mark.parametrize("kind", KINDS)
def test_versions_go_forward_and_the_same_one_again_is_nothing(make: Any, kind: str, sent: list[str]) -> None:
    pair = make(kind)
    assert pair.sync.is_stale(0)
    pair.sync.sync(3)
    assert [pair.sync.is_stale(version) for version in (2, 3, 4)] == [False, False, True]
    sent.clear()
    pair.sync.sync(3)
    assert not sent
    with pytest.raises(ConfigError, match=r"sync\(2\): a generator has the weights of version 3"):
        pair.sync.sync(2)
    pair.check(3)


def test_a_copy_in_another_dtype_is_filled_too(make: Any) -> None:
    for kind in KINDS:
        pair = make(kind, dtype="bfloat16")
        for version in (1, 2):
            pair.sync.sync(version)
            pair.check(version, atol=0.1)
            pair.policy.update(recorded(seed=version))


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_in_bfloat16_holds_the_policys_weights_rounded(make: Any, kind: str) -> None:
    """The policy keeps float32. A generator with a model of its own loads it in bfloat16 and holds no other copy."""
    pair = make(kind, dtype="bfloat16")
    pair.policy.update(recorded(seed=1))
    pair.sync.sync(1)
    ((held, copied),) = pair.generator.group.run(
        lambda worker: (worker._engine.model.state_dict(), worker._engine.copied)
    )
    ((trained),) = pair.policy.group.run(lambda worker: worker.model.state_dict())
    assert copied is (kind == "colocated")
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    assert all(torch.equal(held[name], tensor.bfloat16()) for name, tensor in trained.items())


def test_a_generator_without_a_policy_draws_in_any_data_type(cluster: Cluster) -> None:
    for dtype in ("bfloat16", "float16"):
        generator = cluster.start(Generator.bind(TINY, EngineConfig(dtype=dtype)))
        assert len(generator.generate(PROMPTS, SAMPLING)) == 4
        generator.group.close()


def test_delta_sends_what_has_changed(make: Any, sent: list[str]) -> None:
    model = replace(TINY, lora=LoraConfig(rank=4, alpha=8.0, targets=("q_proj",)))
    for dtype in (None, "bfloat16"):
        pair = make("delta", model, dtype=dtype)
        sent.clear()
        pair.sync.sync(1)
        assert {"model.embed_tokens.weight", "model.norm.weight"} <= set(sent)
        sent.clear()
        for version in (2, 3):
            pair.policy.update(recorded(seed=version))
            pair.sync.sync(version)
            assert all(name.partition(".q_proj.")[2].startswith("lora_") for name in sent), "no weight changed"
            assert len(set(sent)) == 4 - 2 * (version == 2), "the first update finds no gradient of lora_A"
            pair.check(version, atol=1e-5 if dtype is None else 0.1)


@pytest.mark.each_value
@pytest.mark.parametrize("engine", [{"name": "native"}, {"name": "transformers"}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize(
    ("shape", "targets"),
    [(SHAPE, ()), (UNTIED, ("lm_head", "embed_tokens")), (EXPERTS, ())],
    ids=["all", "ends", "moe"],
)
def test_adapters_are_published_alone_and_give_the_bits_of_merged_weights(
    make: Any, arrived: dict[str, int], shape: Any, targets: tuple[str, ...], engine: dict[str, str]
) -> None:
    model = replace(TINY, config=shape, lora=LoraConfig(rank=2, alpha=8.0, targets=targets))
    pair = make("streamed", model, **engine)
    for version in (1, 2, 3):
        arrived.clear()
        pair.policy.update(recorded(seed=version))
        pair.sync.sync(version)
        (trained,) = pair.policy.group.run(lambda worker: dict(full_weights(worker.model)))
        (drawn,) = pair.generator.group.run(lambda worker: worker._engine.model.state_dict())
        dtypes = {name: drawn[name].dtype for name in trained}
        (merged,) = pair.policy.group.run(
            lambda worker, dtypes=dtypes: {
                name: WholeWeights(worker.model).gather(name, dtype) for name, dtype in dtypes.items()
            }
        )
        assert all(torch.equal(drawn[name], merged[name].to(dtypes[name])) for name in trained)
        adapters = sum(nbytes for name, nbytes in arrived.items() if "lora_" in name)
        (expected,) = pair.policy.group.run(
            lambda worker: sum(p.nbytes for p in worker.model.parameters() if p.requires_grad)
        )
        base = sum(tensor.nbytes for tensor in trained.values()) if version == 1 else 0
        assert (adapters, sum(arrived.values())) == (expected, expected + base), "the base comes once"
    pair.check(3, atol=0.1 if "dtype" in engine else 1e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["streamed", "colocated"])
@pytest.mark.parametrize(
    ("dtype", "engine_dtype"), [("bfloat16", None), ("float32", "bfloat16"), ("float32", "float16")]
)
def test_a_coarse_generator_draws_with_small_updates_of_adapters(
    make: Any, kind: str, dtype: str, engine_dtype: str | None
) -> None:
    pair = make(kind, replace(ADAPTED, dtype=dtype), **({} if engine_dtype is None else {"dtype": engine_dtype}))
    coarse = getattr(torch, engine_dtype or dtype)

    def shift(worker: Any) -> dict[str, torch.Tensor]:
        """Change the adapters by little, and return the merged weights."""
        source = torch.Generator().manual_seed(1)
        for name, parameter in worker.model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0.0, 1e-5, generator=source)
        worker.engine.step_count += 1
        weights = WholeWeights(worker.model)
        return {name: weights.gather(name, coarse) for name in weights.adapted}

    (merged,) = pair.policy.group.run(shift)
    pair.sync.sync(1)
    (drawn,) = pair.generator.group.run(lambda worker: worker._engine.model.state_dict())
    assert all(torch.equal(drawn[name], weight) for name, weight in merged.items())


class ScaledBuckets(Policy):
    """It changes the weights that it sends, as one that quantizes them."""

    @endpoint(collect=Policy.weight_bucket.spec.collect, returns="ref")
    def weight_bucket(self, index: int, bucket_bytes: int, known: Any = None) -> Any:
        rows, sums = super().weight_bucket(index, bucket_bytes, known)
        return [row * 2 for row in rows if row is not None], sums


def test_a_policy_with_buckets_of_its_own_sends_merged_weights(cluster: Cluster) -> None:
    policy, generator = cluster.start(ScaledBuckets.bind(ADAPTED, OPTIM)), cluster.start(Generator.bind(TINY))
    sync = StreamedSync(policy, [generator], bucket_bytes=BUCKET)
    for version in (1, 2):
        policy.update(recorded(seed=version))
        sync.sync(version)
        (trained,) = policy.group.run(lambda worker: dict(full_weights(worker.model)))
        (drawn,) = generator.group.run(lambda worker: worker._engine.model.state_dict())
        assert all(torch.equal(drawn[name], tensor * 2) for name, tensor in trained.items())
    for handle in (policy, generator):
        handle.group.close()


def test_a_generator_that_lacks_the_base_gets_it_and_the_others_do_not(cluster: Cluster, arrived: Any) -> None:
    policy = cluster.start(Policy.bind(ADAPTED, OPTIM))
    first, second = (cluster.start(Generator.bind(replace(TINY, seed=seed))) for seed in (5, 6))
    sync = StreamedSync(policy, [first, second], bucket_bytes=BUCKET)
    sync.init()
    sync.sync(1, [first])
    policy.update(recorded(seed=1))
    arrived.clear()
    sync.sync(2)
    base = sum(nbytes for name, nbytes in arrived.items() if "lora_" not in name)

    def forget(worker: Any) -> None:  # as a new process
        worker._synced, worker._apart, worker._weights = None, {}, {}

    second.group.run(forget)
    policy.update(recorded(seed=2))
    arrived.clear()
    sync.sync(3)
    (trained,) = policy.group.run(lambda worker: dict(full_weights(worker.model)))
    assert base == sum(tensor.nbytes for tensor in trained.values()), "to the second alone"
    assert base == sum(nbytes for name, nbytes in arrived.items() if "lora_" not in name), "and once more to it"
    for generator in (first, second):
        (drawn,) = generator.group.run(lambda worker: worker._engine.model.state_dict())
        assert all(torch.equal(drawn[name], tensor) for name, tensor in trained.items())
    for handle in (policy, first, second):
        handle.group.close()


def test_delta_needs_no_engine_whose_weights_can_be_read(
    make: Any, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, load = NativeEngine.rows, NativeEngine.load

    def load_with_rows(self: NativeEngine, name: str, start: int, values: Tensor) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(NativeEngine, "rows", rows)
            load(self, name, start, values)

    monkeypatch.setattr(NativeEngine, "load", load_with_rows)
    monkeypatch.setattr(NativeEngine, "rows", lambda *_: None)  # as vLLM, which joins and packs them
    pair = make("delta")
    pair.sync.sync(1)
    sent.clear()
    pair.sync.sync(2)
    assert not sent
    pair.check(2)


def test_delta_sends_all_where_the_generator_does_not_hold_what_it_was_sent(make: Any, sent: list[str]) -> None:
    pair = make("delta", replace(TINY, lora=LoraConfig(rank=4, alpha=8.0, targets=("q_proj",))))
    pair.sync.sync(1)

    def tamper(worker: Any) -> None:
        worker._ready_engine().rows("model.norm.weight", 0, 32).add_(1.0)

    pair.generator.group.run(tamper)
    pair.policy.update(recorded())
    notes: list[Any] = []
    unsubscribe = subscribe(notes.append)
    sent.clear()
    pair.sync.sync(2)
    unsubscribe()
    assert [note.text for note in notes if isinstance(note, Note)] == [
        "weight sync 2: generators do not hold model.norm.weight as sent; sending all"
    ]
    assert "model.norm.weight" in sent
    pair.check(2)


def test_what_arrives_damaged_is_named_and_not_drawn_from(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make("delta")
    pair.sync.sync(1)
    pair.policy.update(recorded())
    copy = WeightReceiver._copy

    def damaged(self: WeightReceiver, engine: Any, piece: Piece, values: Any, expected: Any) -> bool:
        bad = values + 1 if values is not None and values.shape == (8,) else values
        return copy(self, engine, piece, bad, expected)

    with monkeypatch.context() as patch:
        patch.setattr(WeightReceiver, "_copy", damaged)
        with pytest.raises(DataError, match=r"version 2 arrived damaged: the checksums of model\.layers\.0\.self_attn"):
            pair.sync.sync(2)
    assert pair.sync.is_stale(1)
    with pytest.raises(EndpointError, match=r"version 2 arrived only in part.* sync again") as caught:
        pair.generator.generate(PROMPTS, SAMPLING)
    assert isinstance(caught.value.__cause__, GenerationError)
    pair.sync.sync(2)
    pair.check(2)


def test_a_generator_of_another_shape_is_refused_at_once(cluster: Cluster) -> None:
    policy = cluster.start(Policy.bind(TINY))
    other = replace(TINY, config={**TINY.config, "intermediate_size": 96})
    generator = cluster.start(Generator.bind(other))
    with pytest.raises(EndpointError, match=r"weight model\.layers\.0\.mlp\.gate_proj\.weight has shape \[64, 32\]"):
        StreamedSync(policy, [generator]).init()
    with pytest.raises(ConfigError, match="bucket_bytes = 0"):
        StreamedSync(policy, [generator], bucket_bytes=0)
    generator.group.close()
    policy.group.close()


def test_a_bucket_that_never_came_is_named() -> None:
    policy, generator = Policy(TINY, OPTIM), Generator(TINY)
    weights = policy.weight_manifest().weights
    generator.prepare_weight_sync(weights, BUCKET)
    buckets = cut(weights, BUCKET)
    for index in range(len(buckets)):
        tensors, sums = policy.weight_bucket(index, BUCKET)
        if index != 3:
            assert generator.receive_weights(1, index, tensors, sums) == []
    with pytest.raises(DataError, match=rf"version 1 are incomplete: rows of .* such as \['{buckets[3][0].name}"):
        generator.finish_weight_sync(1)
    with pytest.raises(DataError, match="are incomplete"):
        generator.finish_weight_sync(2)
    assert generator.weights_version() is None
    for index in range(len(buckets)):  # the next version begins anew, and needs no second announcement
        assert generator.receive_weights(2, index, *policy.weight_bucket(index, BUCKET)) == []
    generator.finish_weight_sync(2)
    assert generator.weights_version() == 2


class Hasty(Policy):
    """Updates itself between two buckets, once."""

    @endpoint(collect=Policy.weight_bucket.spec.collect, returns="ref")
    def weight_bucket(self, index: int, bucket_bytes: int, known: Any = None) -> Any:
        if index == 3 and not self.engine.step_count:
            self.update(recorded())
        return super().weight_bucket(index, bucket_bytes, known)


@pytest.mark.parametrize("delta", [False, True])
def test_a_policy_that_is_updated_between_two_buckets_is_noticed(cluster: Cluster, delta: bool) -> None:
    policy, generator = cluster.start(Hasty.bind(TINY, OPTIM)), cluster.start(Generator.bind(TINY))
    sync = StreamedSync(policy, [generator], bucket_bytes=BUCKET, delta=delta)
    with pytest.raises(DataError, match="updated while its weights were sent as version 1"):
        sync.sync(1)
    with pytest.raises(EndpointError, match=r"version 1 arrived only in part.* sync again"):
        generator.generate(PROMPTS, SAMPLING)
    sync.sync(1)
    assert not sync.is_stale(1)
    generator.group.close()
    policy.group.close()


class Books:
    """A policy and a generator that only keep books: which buckets were made, and which of them are copied."""

    def __init__(self) -> None:
        self.made, self.copied, self.most, self.announced = 0, 0, 0, 0
        self.version: int | None = None
        names = ("weights_version", "prepare_weight_sync", "receive_weights", "finish_weight_sync")
        for name in names:
            setattr(self, name, SimpleNamespace(submit=partial(self.submit, name)))

    def weight_manifest(self) -> WeightManifest:
        return WeightManifest(tuple(WeightInfo(f"layer{i}", (10,), 4) for i in range(9)), 0, "")

    def weights_in_place(self) -> None:
        """They are nowhere."""

    def weight_site(self) -> list[Site]:
        return [Site("", 0)]

    def weight_bucket(self, index: int, bucket_bytes: int, known: object) -> tuple[list[Tensor], None]:
        self.made += 1
        assert self.made == index + 1
        self.most = max(self.most, self.made - self.copied)
        return [torch.zeros(10)], None

    def submit(self, name: str, *args: Any) -> Any:
        return SimpleNamespace(result=partial(self.result, name))

    def result(self, name: str) -> list[Any]:
        self.copied += name == "receive_weights"
        self.announced += name == "prepare_weight_sync"
        return [[]] if name == "receive_weights" else [self.version]


def test_two_buckets_are_in_flight_and_no_more() -> None:
    books: Any = Books()
    StreamedSync(books, [books], bucket_bytes=40).sync(1)
    assert (books.made, books.copied, books.most) == (9, 9, 2)


def test_weights_are_announced_once_and_again_to_a_generator_that_has_none() -> None:
    books: Any = Books()
    sync = StreamedSync(books, [books], bucket_bytes=40)
    found: list[int] = []
    for version, held in ((1, None), (2, 1), (3, 2), (4, None), (5, 4)):
        books.version, books.made = held, 0
        sync.sync(version)
        found.append(books.announced)
    assert found == [1, 1, 1, 2, 2]


def test_buckets_hold_every_row_once_and_no_more_than_they_may() -> None:
    weights = (
        WeightInfo("scalar", (), 4),
        WeightInfo("tall", (1000, 8), 4),
        WeightInfo("wide", (3, 5000), 2),
        WeightInfo("empty", (0, 4), 4),
        *(WeightInfo(f"norm{i}", (16,), 4) for i in range(20)),
    )
    shapes = {info.name: info for info in weights}
    for size in (1, 100, 4096, 10**6):
        buckets = cut(weights, size)
        rows: dict[str, list[int]] = {info.name: [] for info in weights}
        for bucket in buckets:
            bytes_of = [
                (piece.stop - piece.start) * max(1, torch.Size(shapes[piece.name].shape[1:]).numel())
                * shapes[piece.name].itemsize
                for piece in bucket
            ]  # fmt: skip
            assert bucket
            assert sum(bytes_of) <= size or len(bucket) == 1
            for piece in bucket:
                rows[piece.name] += range(piece.start, piece.stop)
        assert rows == {info.name: list(range(info.shape[0] if info.shape else 1)) for info in weights}
    assert len(cut(weights, 10**6)) == 1
    assert cut((), 10) == []


def test_a_checksum_sees_every_change_and_only_the_bytes() -> None:
    torch.manual_seed(0)
    for values in (torch.randn(3000, 7), torch.randn(5001).bfloat16(), torch.randn(3), torch.tensor(2.0)):
        sum_before = checksum(values)
        assert sum_before == checksum(values.clone()) < 2**64
        for place in {0, values.numel() // 2, values.numel() - 1}:
            other = values.clone()
            other.view(-1)[place] = -other.view(-1)[place]
            assert checksum(other) != sum_before
    table = torch.randn(64, 1024)
    order = torch.randperm(64)
    assert checksum(table[order]) != checksum(table)
    assert checksum(table.flip(1)) != checksum(table)
    assert checksum(table.T) == checksum(table.T.contiguous())
    odd = torch.randn(40001).bfloat16()
    assert checksum(odd[1:]) == checksum(odd[1:].clone())  # words that begin anywhere
    assert checksum(torch.empty(0)) == checksum(torch.empty(0, 3))
    assert Piece("a", 0, 1) == ("a", 0, 1)
