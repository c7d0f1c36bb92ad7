"""Decode steps of static shape: each is recorded once as a CUDA graph, and replayed. docs/gpu.md has its speed.

    lanes ──tokens, positions, random numbers──▶ static buffers ──▶ graph (rows, span, parameters) ──▶ static results
                                                                     forward pass, and the draw where it is static

- ``rows`` is the smallest of 1, 2, 4, 8, … and the number of lanes that holds all live lanes. The other rows are free
  lanes: they write keys and values behind the text that they remember, where nobody reads.
- ``span`` is the number of positions that attention reads: the smallest of 128, 256, 512, … and the cache's length.
- A draw is static where all rows draw by the same parameters without top-k and top-p. Otherwise the graph ends with the
  logits, and the draw follows it.

A graph holds addresses. It stays valid while weights are overwritten in place, as a weight sync and an optimizer do.
All graphs are dropped when a tensor has another address: after a parameter's data was replaced, weights slept and woke,
the cache grew or was given back, or rotary tables became longer.

Legend: A rows, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from podium.rollout.engines.draw import draw
from podium.rollout.sampling import SamplingParams
from podium_native.cache import KVCache
from podium_native.decoder import Decoder
from podium_native.parameters import DecoderWeights, Mlp

__all__ = ["DecodeGraphs", "Record", "Recorder", "Step", "StepResult", "bucket", "graphless", "record", "renew"]

_SHORTEST_SPAN = 128
_MOST = 64  # graphs that are kept; the oldest goes first
_WARMUPS = 2  # before recording, for libraries that allocate or choose kernels at their first call


class StepResult(NamedTuple):
    """Ids and log-probabilities ``[A]`` where the draw belongs to the step, and otherwise logits ``[A, V]``. They are
    valid until the next step."""

    logits_AV: Tensor | None
    ids_A: Tensor | None
    logprobs_A: Tensor | None


Step: TypeAlias = Callable[[], StepResult]
Record: TypeAlias = Callable[[Step, torch.device], Step]


class DecodeGraphs:
    """Recorded decode steps for one cache, by number of rows, span and parameters.

    Args:
        record: Turns a step into one that is replayed; None for a :class:`Recorder`.
    """

    def __init__(self, record: Record | None = None) -> None:
        self._record = record
        self.clear()

    def clear(self) -> None:
        """Drop all graphs and buffers."""
        self._steps: dict[tuple[int, int, SamplingParams | None], Step] = {}
        self._recorder = self._record or Recorder()
        self._decoder: Decoder | None = None
        self._cache: KVCache | None = None
        self._places: list[int] = []
        self._looked = False

    def __len__(self) -> int:
        return len(self._steps)

    def look_again(self) -> None:
        """Compare addresses at the next step, because weights may have moved since the last one."""
        self._looked = False

    def step(
        self,
        decoder: Decoder,
        cache: KVCache,
        inputs: tuple[Tensor, Tensor, Tensor],
        until: int,
        params: SamplingParams | None,
    ) -> StepResult:
        """Decode one token of the first A lanes.

        Args:
            inputs: Token ids and positions, int64, and random numbers, float64, each ``[A]``.
            until: One past the largest position of a live lane.
            params: What all rows are drawn by; None to draw nothing.
        """
        self._look(decoder, cache)
        rows, span = len(inputs[0]), bucket(until, cache.length, _SHORTEST_SPAN)
        buffers = [buffer[:rows] for buffer in self._buffers]
        for buffer, values in zip(buffers, inputs, strict=True):
            buffer.copy_(values)
        key = (rows, span, params)
        if (step := self._steps.get(key)) is None:
            if len(self._steps) == _MOST:
                del self._steps[next(iter(self._steps))]
            step = self._recorder(_step(decoder, cache, buffers, span, params), buffers[0].device)
            self._steps[key] = step
        return step()

    def _look(self, decoder: Decoder, cache: KVCache) -> None:
        if self._looked and self._decoder is decoder and self._cache is cache:
            return
        places = [tensor.data_ptr() for tensor in (*decoder.tensors, cache.keys_by_time, cache.values)]
        if self._decoder is not decoder or self._cache is not cache or self._places != places:
            self.clear()
            self._decoder, self._cache, self._places = decoder, cache, places
            dtypes = (torch.int64, torch.int64, torch.float64)
            self._buffers = [torch.zeros(cache.lanes, dtype=dtype, device=cache.device) for dtype in dtypes]
        self._looked = True


class Recorder:
    """Records steps as CUDA graphs, which share one pool of memory. A CPU runs the step itself."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None  # the same for all, since BLAS keeps memory for each stream

    def __call__(self, step: Step, device: torch.device) -> Step:
        if device.type != "cuda":
            return step
        with torch.cuda.device(device):
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._stream = self._stream or torch.cuda.Stream()
            graph, result = record(step, self._pool, self._stream)

        def replay() -> StepResult:
            with torch.cuda.device(device):
                graph.replay()
            return result

        return replay


def record(step: Step, pool: Any, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, StepResult]:
    """Record a step on the current device, and return the graph with the tensors that hold its results.

    Other threads of the process may use the device meanwhile, as those that receive weights do. Graphs of one pool use
    the same memory one after the other, so that a graph's results must be read before the next graph is replayed.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARMUPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        result = step()
    return graph, result


def bucket(size: int, most: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least ``size`` and ``least``; or ``most`` where that is smaller."""
    return min(max(1 << max(size - 1, 0).bit_length(), least), most) if size else 0


def graphless(weights: DecoderWeights) -> str:
    """Return why the steps of a decoder have no static shape; "" where they have."""
    static = all(isinstance(layer.mlp, Mlp) for layer in weights.layers)
    return "" if static else "the number of tokens that an expert gets differs from step to step"


@torch.inference_mode()  # copies may have been made in it
def renew(held: DecoderWeights, fresh: DecoderWeights) -> bool:
    """Make the copies among ``held`` equal to those of ``fresh``, which was read from the same model later. Return
    whether all else has the same addresses; if not, nothing is changed."""
    if [tensor.data_ptr() for tensor in held.shared] != [tensor.data_ptr() for tensor in fresh.shared]:
        return False
    for old, new in zip(held.layers, fresh.layers, strict=True):
        if old.qk_norm is not None and new.qk_norm is not None:
            old.qk_norm.copy_(new.qk_norm)
    return True


def _step(decoder: Decoder, cache: KVCache, buffers: list[Tensor], span: int, params: SamplingParams | None) -> Step:
    tokens_A, positions_A, numbers_A = buffers

    def step() -> StepResult:
        logits_AV = decoder.decode(tokens_A, positions_A, cache, span)
        if params is None:
            return StepResult(logits_AV, None, None)
        sampled = draw(logits_AV, params, numbers_A)
        return StepResult(None, sampled.ids_B, sampled.logprobs_B)  # so that the next graph uses the logits' memory

    return step
