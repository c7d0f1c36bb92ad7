"""Few rows of a packed matrix have the bits of sixteen rows of the matrix as it is."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.sampling import SamplingParams
from podium_native import packing
from podium_native.decoder import Decoder
from podium_native.packing import WIDTHS, pack, unpack
from podium_native.parameters import Dense
from podium_native.products import ROW_QUANTUM, add_product, multiply, round_rows
from tests.unit.rollout.engines.conftest import same
from tests.warm_python import run_python

# Of small models, SmolLM2-135M and -360M, Qwen2.5-0.5B, Qwen3-0.6B, and sums that no block divides.
SHAPES = [(64, 192), (416, 128), (576, 960), (1536, 576), (960, 1600), (2560, 960), (896, 1152), (4864, 896)]
SHAPES += [(1024, 4096), (3072, 1024), (2048, 2048), (1000, 333), (391, 77), (1153, 800)]
NUMBERS = range(1, ROW_QUANTUM + 1)

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this build of torch has no MKL")


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of all sizes are packed, and nothing is known of them."""
    monkeypatch.setattr(packing, "_ways", {})
    monkeypatch.setattr(packing, "_LEAST_BYTES", 0)


def is_intel() -> bool:
    with open("/proc/cpuinfo") as file:
        return "GenuineIntel" in file.read()


@pytest.fixture
def packs() -> None:
    """Skip where nothing is packed, as on AMD's processors. On Intel's a test fails then."""
    if not is_intel() and not pack([make_dense((64, 192)), make_dense((576, 960))]):
        pytest.skip("no way of packing has the bits here")


def make_dense(shape: tuple[int, int], *, has_bias: bool = False) -> Dense:
    torch.manual_seed(0)
    terms, columns = shape
    return Dense(torch.randn(columns, terms).t(), torch.randn(columns) if has_bias else None, is_apart=True)


@pytest.mark.each_value
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("shape", "has_bias"), [*((shape, False) for shape in SHAPES), ((896, 1152), True), ((1000, 333), True)]
)
def test_few_rows_have_the_bits_of_sixteen(shape: tuple[int, int], has_bias: bool) -> None:
    dense = make_dense(shape, has_bias=has_bias)
    rows, residual = torch.randn(ROW_QUANTUM, shape[0]), torch.randn(ROW_QUANTUM, shape[1])
    product, whole = multiply(rows, dense), add_product(residual, rows, dense)
    if not pack([dense]):
        pytest.skip("no way of packing has the bits here")
    assert dense.packed
    for number in NUMBERS:
        assert torch.equal(multiply(rows[:number], dense), product[:number]), number
        assert torch.equal(add_product(residual[:number], rows[:number], dense), whole[:number]), number


def test_matrices_of_published_models_can_be_packed() -> None:
    """The test above is skipped where nothing is packed: on Intel's processors most are."""
    if not is_intel():
        pytest.skip("this was tried on Intel's processors only")
    packed = [shape for shape in SHAPES[:11] if pack([make_dense(shape)])]
    assert len(packed) >= 8, packed


@pytest.mark.usefixtures("packs")
def test_what_sums_in_another_order_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a BLAS does with packed matrices, none is used whose bits differ, at any width."""
    products: Any = torch.ops.mkl._mkl_linear

    class Reordered:
        """Sums from the end, for ``width`` rows."""

        width = 4

        def _mkl_linear(self, rows: Tensor, matrix: Tensor, shape: Tensor, bias: None, number: int) -> Tensor:
            result = products(rows, matrix, shape, bias, number)
            return result.nextafter(result + 1) if number == self.width else result

        _mkl_reorder_linear_weight = staticmethod(torch.ops.mkl._mkl_reorder_linear_weight)

    matrices = [make_dense((64, 192)), make_dense((576, 960))]
    assert pack(matrices)
    unpack(matrices)
    monkeypatch.setattr(torch.ops, "mkl", Reordered())
    for width in WIDTHS:
        monkeypatch.setattr(packing, "_ways", {})
        monkeypatch.setattr(Reordered, "width", width)
        assert not pack(matrices), width
        assert not any(dense.packed for dense in matrices)


@pytest.mark.usefixtures("packs")
def test_broken_weights_leave_no_verdict() -> None:
    dense = make_dense((576, 960))
    broken = Dense(torch.full_like(dense.weight_t, torch.nan), None, is_apart=True)
    assert not pack([broken])
    assert pack([dense])


def test_nothing_is_packed_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = make_dense((576, 960))
    monkeypatch.setattr(packing, "free_memory_bytes", lambda _: 3 * dense.weight_t.nbytes)
    assert not pack([dense])
    assert not dense.packed


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        *((0, (0, 0, 0, 0)), (1, (1, 1, 1, 16)), (2, (2, 2, 2, 16)), (3, (4, 4, 3, 16)), (5, (8, 8, 16, 16))),
        *((9, (12, 12, 16, 16)), (13, (16, 16, 16, 16)), (17, (32, 32, 32, 32))),
    ],
)
def test_rows_of_lanes(lanes: int, expected: tuple[int, ...]) -> None:
    ways = [(True, True), (True, False), (False, False), (False, True)]
    assert tuple(round_rows(lanes, is_packed=packed, is_exact=exact) for packed, exact in ways) == expected


def make_models() -> dict[str, Any]:
    """Models whose sums have several blocks, one with biases and one with norms of heads."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 300, "tie_word_embeddings": False}
    sizes |= {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 512}
    heads: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**sizes, **heads, hidden_size=576, intermediate_size=1536)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**sizes, hidden_size=448, intermediate_size=1000,
                                              num_attention_heads=7, num_key_value_heads=1)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, hidden_size=512, intermediate_size=700)),
    }  # fmt: skip


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return make_models()[request.param].eval().requires_grad_(False)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows that were decoded."""
    numbers: list[int] = []
    decode = Decoder.decode

    def count_rows(self: Decoder, tokens: Tensor, *arguments: Any) -> Tensor:
        numbers.append(len(tokens))
        return decode(self, tokens, *arguments)

    monkeypatch.setattr(Decoder, "decode", count_rows)
    return numbers


@pytest.mark.everyday("llama-1 thread")
@pytest.mark.usefixtures("packs", "threads")
@pytest.mark.parametrize("threads", [1, 2], ids=["1 thread", "2 threads"], indirect=True)
def test_a_completion_has_the_same_bits_in_few_rows(
    model: Any, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are drawn beside it, and as if nothing were packed. The lengths differ, so that lanes move."""
    torch.manual_seed(1)
    prompts = [torch.randint(0, 300, (length,)).tolist() for length in range(3, 23)]
    engine = make_engine(EngineConfig(name="native"), model)

    params = SamplingParams(max_new_tokens=30, stop_token_ids=tuple(range(0, 300, 40)))

    def draw(count: int) -> list[Any]:
        rows.clear()
        return engine.generate(prompts[:count], params, range(count))

    together = draw(20)
    for count in (1, 2, 3, 5, 7, 11, 16):
        assert same(draw(count), together[:count]), count
        assert max(rows) < ROW_QUANTUM or count > 12
    monkeypatch.setattr(packing, "_LEAST_STEPS", 1000)
    plain = make_engine(EngineConfig(name="native"), copy.deepcopy(model))
    assert same(plain.generate(prompts[:3], params, range(3)), together[:3])


@pytest.mark.everyday("qwen2")
@pytest.mark.usefixtures("packs")
def test_new_weights_are_packed_anew(model: Any, rows: list[int]) -> None:
    """Completions in flight go on with new weights, in as few rows, as a fresh engine would draw the rest."""
    engine = make_engine(EngineConfig(name="native"), model)
    params, prompts = SamplingParams(max_new_tokens=40), [[5, 6, 7], [8, 9]]
    before = engine.generate(prompts, params, [1, 2])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    engine.refresh(1)
    rows.clear()
    after = engine.generate(prompts, params, [1, 2])
    assert {*rows} == {2}
    fresh = make_engine(EngineConfig(name="native"), copy.deepcopy(model)).generate(prompts, params, [1, 2])
    assert not same(before, after)
    for mine, theirs in zip(after, fresh, strict=True):
        assert torch.equal(mine.token_ids, theirs.token_ids)
        assert torch.equal(mine.logprobs, theirs.logprobs)


@pytest.mark.everyday("llama", "qwen2")
@pytest.mark.usefixtures("packs")
def test_release_gives_the_copies_back(model: Any) -> None:
    engine: Any = make_engine(EngineConfig(name="native"), model)
    engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=30), [1])
    matrices = engine._decoder.weights.dense
    assert all(dense.packed for dense in matrices)
    engine.release()
    assert not any(dense.packed for dense in matrices)
    engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=30), [1])
    assert all(dense.packed for dense in matrices)


VERSIONS = """
import gc, sys, torch
from pathlib import Path
from podium.backends.process import keep_freed_memory
from podium_native.packing import pack, unpack
from podium_native.parameters import Dense

def anonymous_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10

keep_freed_memory()  # as in a worker process
torch.set_num_threads(1)
shapes = [(576, 960), (576, 576), (576, 3072), (1536, 576)] * 4
dense = [Dense(torch.randn(columns, terms).t(), None, is_apart=True) for terms, columns in shapes]
nbytes = sum(one.weight_t.nbytes for one in dense)
held = []
for _ in range(10):
    assert pack(dense)
    activations = [torch.randn(1000, 576) for _ in range(10)]
    unpack(dense)
    del activations
    gc.collect()
    held.append(anonymous_bytes())
print((max(held) - held[0]) / nbytes)
"""


@pytest.mark.usefixtures("packs")
def test_the_memory_of_packed_matrices_does_not_grow_with_the_versions() -> None:
    """malloc would keep it in holes that the next version does not fit into."""
    result = run_python("-c", VERSIONS)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 0.5, f"a process grew by {float(result.stdout):.1f} times the matrices"
