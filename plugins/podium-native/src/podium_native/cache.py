"""Keys and values of every lane, preallocated, and attention over them.

Rows of a lane are its positions, from 0. Two layouts, one contract:

    GemmCache   keys [layer, lane, kv, D, T], values [layer, lane, kv, T, D], float32    CPU: two batched products
    SdpaCache   keys and values [layer, lane, kv, T, D], in the model's dtype            CUDA: one fused kernel

On the CPU keys lie transposed because the product with the queries is then two to three times faster, and in float32
because batched products of bfloat16 are half as fast there (both measured with torch 2.13).

Legend: A active lanes (a prefix), T positions, D head_dim, H heads, G heads that share one kv head, L layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from podium_native.parameters import DecoderWeights
from podium_native.products import ROW_QUANTUM

__all__ = ["LENGTH_QUANTUM", "GemmCache", "KVCache", "SdpaCache", "cache_class", "round_up"]

# The attention of a row does not depend on the span of positions as long as that is a multiple of 16 and at least 32,
# and few values are summed at once: elsewhere BLAS takes kernels that sum in another order, or cuts the sum where the
# span says so (MKL cuts more than 384 in halves on Intel's processors, and more than 192 on AMD's).
LENGTH_QUANTUM = 32  # positions of lanes come in multiples of it
_TIME_QUANTUM = 16
_SHORTEST_SPAN = 32
_SUMMED_AT_ONCE = (256, 192, 128, 64, 32)  # numbers of values that are tried, the first that holds is taken


class KVCache(ABC):
    """Room for ``lanes`` sequences of up to ``length`` positions.

    ``span(positions_A, until)`` fixes, for one decode step, which positions each lane attends to: its own and all
    before it, or the last of these in layers with a window. ``until`` is the longest. Then, layer by layer, ``attend``
    writes the new key and value of each active lane and returns what its queries read.
    """

    keys_by_time: Tensor
    """The keys ``[L, lane, kv, T, D]``, a view where they lie transposed."""
    values: Tensor

    def __init__(self, weights: DecoderWeights, lanes: int, length: int) -> None:
        self.lanes, self.length, self._made_for = lanes, length, _signature(weights)
        self._windows = [layer.window for layer in weights.layers]
        self.kv_heads, self.group = weights.kv_heads, weights.heads // weights.kv_heads
        self.head_dim, self.device = weights.head_dim, weights.device
        self._scale = weights.head_dim**-0.5
        self._rows = torch.arange(lanes, device=self.device)
        self._times = torch.arange(length, device=self.device)

    @staticmethod
    def dtype_for(weights: DecoderWeights) -> torch.dtype:
        """Data type of keys and values."""
        return weights.dtype

    @classmethod
    def bytes_per_position(cls, weights: DecoderWeights) -> int:
        """Bytes that one position of one lane takes."""
        return 2 * len(weights.layers) * weights.kv_heads * weights.head_dim * cls.dtype_for(weights).itemsize

    def fits(self, weights: DecoderWeights) -> bool:
        """Whether this cache was made for weights of that shape, dtype and device."""
        return self._made_for == _signature(weights)

    @abstractmethod
    def span(self, positions_A: Tensor, until: int) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        """Begin a step: returns ``attend(layer, q [A, H, D], k [A, kv, D], v [A, kv, D]) -> [A, H * D]``."""

    def place(self, keys: Tensor, values: Tensor, rows: Tensor, lanes: Tensor) -> None:
        """Write prompts ``rows`` of ``keys`` and ``values [L, P, kv, T, D]`` at position 0 of ``lanes``."""
        for cache, prompts in ((self.keys_by_time, keys), (self.values, values)):
            chosen = prompts.index_select(1, rows).to(cache.dtype)
            cache[:, :, :, : chosen.shape[3]].index_copy_(1, lanes, chosen)

    def swap(self, pairs: Sequence[tuple[int, int]], until: int) -> None:
        """Let the first ``until`` positions of two lanes change places, for each pair."""
        # Lane by lane, because torch gathers several lanes of such a view an element at a time.
        for cache in (self.keys_by_time, self.values):
            filled = cache[:, :, :, :until]
            for first, second in pairs:
                cached = filled[:, first].clone()
                filled[:, first] = filled[:, second]
                filled[:, second] = cached

    def read(self, lanes: Tensor, until: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[L, lanes, kv, until, D]`` of the first ``until`` positions."""
        return self.keys_by_time[:, lanes, :, :until], self.values[:, lanes, :, :until]

    def clear(self, lanes: Tensor) -> None:
        """Write zeros over ``lanes``."""
        self.keys_by_time[:, lanes] = self.values[:, lanes] = 0

    def take_over(self, smaller: KVCache) -> None:
        """Copy everything from a cache of fewer lanes or positions."""
        for cache, old in ((self.keys_by_time, smaller.keys_by_time), (self.values, smaller.values)):
            cache[:, : smaller.lanes, :, : smaller.length] = old

    def _of_layers(self, positions: Tensor, until: int, make: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """For each layer ``make(seen)``, made once for layers of one window. Lanes attend where ``seen`` is true."""
        # A free lane may stand behind ``until``, further than its window reaches back. Seeing nothing, it would write
        # NaN, which a later text of that lane meets.
        positions = positions.clamp(max=until - 1)
        times, made = self._times[:until], dict.fromkeys(self._windows, positions)
        for window in made:
            seen = times <= positions
            made[window] = make(seen if window is None else seen & (times > positions - window))
        return [made[window] for window in self._windows]

    def _round_up(self, until: int) -> int:
        return min(max(round_up(until, _TIME_QUANTUM), _SHORTEST_SPAN), self.length)


class GemmCache(KVCache):
    """See the module's docstring."""

    def __init__(self, weights: DecoderWeights, lanes: int, length: int) -> None:
        super().__init__(weights, lanes, length)
        shape = (len(weights.layers), lanes, weights.kv_heads)
        # Zeros: rows past a lane's length meet a probability of exactly 0, which a leftover NaN would not survive.
        self._keys = torch.zeros(*shape, weights.head_dim, length, device=self.device)
        self.keys_by_time = self._keys.transpose(-1, -2)
        self.values = torch.zeros(*shape, length, weights.head_dim, device=self.device)
        self._dtype, self._summed_at_once = weights.dtype, find_summed_at_once(self.group, weights.head_dim)
        self._never = torch.tensor(float("-inf"), device=self.device)
        self._views: list[tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]] = []
        self._views_for = (0, 0)

    @staticmethod
    def dtype_for(weights: DecoderWeights) -> torch.dtype:
        return torch.float32

    def span(self, positions_A: Tensor, until: int) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        until = self._round_up(until)
        active, kv, group, dim = len(positions_A), self.kv_heads, self.group, self.head_dim
        views = self._views_of(active, until)
        biases = self._of_layers(
            positions_A.view(active, 1, 1, 1).expand(active, kv, 1, 1),
            until,
            lambda seen: torch.where(seen, 0.0, self._never).view(active * kv, 1, until),
        )
        index = (self._rows[:active], slice(None), slice(None), positions_A)
        place_value = (self._rows[:active], slice(None), positions_A)
        scale, cast = self._scale, self._dtype != torch.float32

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values, seen_keys, seen_values = views[layer]
            if cast:
                query, key, value = query.float(), key.float(), value.float()
            keys[index] = key
            values[place_value] = value
            scores = torch.baddbmm(biases[layer], query.reshape(active * kv, group, dim), seen_keys, alpha=scale)
            shares = torch.softmax(scores, -1).split(self._summed_at_once, -1)
            mixed = torch.bmm(shares[0], seen_values[0])
            for share, seen in zip(shares[1:], seen_values[1:], strict=True):
                mixed = torch.baddbmm(mixed, share, seen)
            mixed = mixed.view(active, kv * group * dim)
            return mixed.to(self._dtype) if cast else mixed

        return attend

    def _views_of(self, active: int, until: int) -> list[tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]]:
        """Of each layer: all keys, all values, and the part of them that is read, as batches of matrices, and
        the values cut into what is summed at once."""
        if self._views_for != (active, until):
            self._views_for = (active, until)
            rows = active * self.kv_heads
            self._views = [
                (
                    *(keys, values, keys.flatten(0, 1)[:rows, :, :until]),
                    values.flatten(0, 1)[:rows, :until].split(self._summed_at_once, 1),
                )
                for keys, values in zip(self._keys, self.values, strict=True)
            ]
        return self._views


class SdpaCache(KVCache):
    """See the module's docstring."""

    def __init__(self, weights: DecoderWeights, lanes: int, length: int) -> None:
        super().__init__(weights, lanes, length)
        shape = (len(weights.layers), lanes, weights.kv_heads, length, weights.head_dim)
        self.keys_by_time = torch.zeros(shape, dtype=weights.dtype, device=self.device)
        self.values = torch.zeros(shape, dtype=weights.dtype, device=self.device)

    def span(self, positions_A: Tensor, until: int) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        until = self._round_up(until)
        active, kv, group, dim = len(positions_A), self.kv_heads, self.group, self.head_dim
        rows = self._rows[:active]
        masks = self._of_layers(
            positions_A.view(active, 1, 1, 1), until, lambda seen: seen.expand(active, 1, group, until)
        )

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.keys_by_time[layer], self.values[layer]
            keys[rows, :, positions_A] = key
            values[rows, :, positions_A] = value
            # The heads of a group stand as queries of their kv head: its keys are then read once.
            mixed = F.scaled_dot_product_attention(
                query.reshape(active, kv, group, dim),
                keys[:active, :, :until],
                values[:active, :, :until],
                attn_mask=masks[layer],
                scale=self._scale,
            )
            return mixed.reshape(active, kv * group * dim)

        return attend


def find_summed_at_once(group: int, dim: int) -> int:
    """Return of how many positions the values are summed at once on this CPU, for ``group`` queries of ``dim`` numbers:
    the most for which a sum has the same bits whatever number of zeros follows it."""
    key = group, dim, torch.get_num_threads()
    if key not in _summed_at_once:
        sizes = (size for size in _SUMMED_AT_ONCE if _keeps_bits(group, dim, size))
        _summed_at_once[key] = next(sizes, _TIME_QUANTUM)
    return _summed_at_once[key]


_summed_at_once: dict[tuple[int, int, int], int] = {}


def _keeps_bits(group: int, dim: int, size: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    shares, values = (torch.rand(*shape, generator=generator) for shape in ((2, group, size), (2, size, dim)))
    former = torch.rand(2, group, dim, generator=generator)
    for used in range(_TIME_QUANTUM, size, _TIME_QUANTUM):
        padded = F.pad(shares[:, :, :used], (0, size - used))
        stops = range(used, size + 1, _TIME_QUANTUM)
        sums = [torch.bmm(padded[:, :, :stop], values[:, :stop]) for stop in stops if stop >= _SHORTEST_SPAN]
        added = [torch.baddbmm(former, padded[:, :, :stop], values[:, :stop]) for stop in stops]
        if not all(torch.equal(*neighbors) for parts in (sums, added) for neighbors in pairwise(parts)):
            return False
    return True


def _signature(weights: DecoderWeights) -> tuple[object, ...]:
    shape = (weights.heads, weights.kv_heads, weights.head_dim, *(layer.window for layer in weights.layers))
    return (*shape, weights.dtype, weights.device)


def round_up(size: int, quantum: int = ROW_QUANTUM) -> int:
    """The smallest multiple of ``quantum`` that is at least ``size``."""
    return -(-size // quantum) * quantum


def cache_class(device: torch.device) -> type[KVCache]:
    """The layout that is fastest on ``device``."""
    return GemmCache if device.type == "cpu" else SdpaCache
