"""The forward pass of a decoder of the Llama kind: prompts at once, then one token a lane.

Few, large operations: small models are bound by the cost of starting an operation, not by its arithmetic.

Legend: N prompt tokens of a prefill, packed; P prompts; T longest prompt; A active lanes; E hidden size;
H heads, K kv heads, D head_dim; V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from podium_native.cache import KVCache
from podium_native.packing import can_pack, is_worth_packing, pack, unpack
from podium_native.parameters import DecoderWeights, Dense, Mlp
from podium_native.products import ROW_QUANTUM, add_product, multiply
from podium_native.prompt_attention import PromptAttention

__all__ = ["Decoder", "Past", "Prefill"]


class Prefill(NamedTuple):
    """P prompts seen: their keys and values ``[layer, P, K, T, D]`` and the logits of the next token, ``[P, V]``."""

    keys: Tensor
    values: Tensor
    logits_PV: Tensor


class Past(NamedTuple):
    """Keys and values ``[layer, P, K, S, D]`` of the first ``lengths[p]`` positions of each of P prompts."""

    keys: Tensor
    values: Tensor
    lengths: list[int]


class Decoder:
    """Computes logits with given weights; holds no state but tables of cosines and sines.

    Args:
        weights: The weights.
        holes: Ids whose logits are minus infinity.
        wide_output: Whether the output layer is computed in float32.
    """

    def __init__(self, weights: DecoderWeights, holes: Sequence[int] = (), *, wide_output: bool = False) -> None:
        self.weights = weights
        self._wide_output = wide_output and weights.dtype != torch.float32
        self._holes = torch.tensor(holes, device=weights.device) if holes else None
        self._q_and_k = [weights.heads, weights.kv_heads]
        self._qk_and_v = [weights.heads + weights.kv_heads, weights.kv_heads]
        # The norms' own short path pays in float32 on the CPU; elsewhere torch's rms_norm is one kernel, or as fast.
        self._short_norm = weights.dtype == torch.float32 and weights.device.type == "cpu"
        self._eps = torch.full((1, 1), weights.norm_eps, device=weights.device)
        self._qk_eps = torch.full((1, 1, 1), weights.qk_norm_eps, device=weights.device)
        self._packed: bool | None = False if weights.dense is None or not can_pack(weights.dense) else None
        for dense in weights.dense or ():
            dense.is_apart = self._packed is None
        self._cos_sin = torch.empty(0, 2, weights.head_dim, dtype=weights.dtype, device=weights.device)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that a decode step reads besides its inputs and the cache; not those of experts."""
        weights = self.weights
        copies = [layer.qk_norm for layer in weights.layers if layer.qk_norm is not None]
        return [*weights.shared, *copies, self._cos_sin, self._eps, self._qk_eps]

    @property
    def is_narrow(self) -> bool:
        """Whether as few rows as ``packing.WIDTHS`` names have the bits of sixteen rows now."""
        return bool(self._packed)

    def pack(self, lanes: int, steps: int) -> None:
        """Copy the matrices so that few rows are faster, if so many lanes have so many steps before them that it pays,
        and memory and this machine's BLAS allow it."""
        if self._packed is None and self.weights.dense is not None and is_worth_packing(lanes, steps):
            self._packed = pack(self.weights.dense)

    def unpack(self) -> None:
        """Give back what ``pack`` took."""
        if self._packed and self.weights.dense is not None:
            unpack(self.weights.dense)
            self._packed = None

    def reserve(self, length: int) -> None:
        """Have rotary tables for positions below ``length``."""
        if length <= len(self._cos_sin):
            return
        cos, sin = self.weights.rotary(length)
        half = self.weights.head_dim // 2
        signed = torch.cat((-sin[:, :half], sin[:, half:]), -1)  # so that the rotation is x cos + roll(x) signed
        self._cos_sin = torch.stack((cos, signed), 1)

    def prefill(self, prompts: Sequence[Sequence[int]], past: Past | None = None) -> Prefill:
        """One forward pass over all prompts, packed without padding except inside attention.

        With ``past``, only what follows it is computed, at least one token of each prompt. On the CPU in float32 that
        changes no bit, if the past itself comes from a prefill.
        """
        weights, device = self.weights, self.weights.device
        starts = [0] * len(prompts) if past is None else past.lengths
        attention = PromptAttention(starts, [len(prompt) for prompt in prompts], device)
        tokens = [token for prompt, begin in zip(prompts, starts, strict=True) for token in prompt[begin:]]
        count, row, at = len(tokens), attention.rows.to(device), attention.positions.to(device)

        shape = (len(weights.layers), len(prompts), weights.kv_heads, attention.width, weights.head_dim)
        keys, values = (torch.zeros(shape, dtype=weights.dtype, device=device) for _ in range(2))
        if past is not None:
            keys[:, :, :, : past.keys.shape[3]], values[:, :, :, : past.values.shape[3]] = past.keys, past.values
        hidden = F.embedding(_pad_rows(torch.tensor(tokens)).to(device), weights.embedding)
        cos, sin = self._cos_sin[_pad_rows(attention.positions).to(device)].unsqueeze(2).unbind(1)

        for index, layer in enumerate(weights.layers):
            query, key, value = self._project(hidden, index, cos, sin)
            keys[index][row, :, at], values[index][row, :, at] = key[:count], value[:count]
            mixed = attention.attend(query[:count], keys[index], values[index], layer.window)
            hidden = add_product(hidden, F.pad(mixed, (0, 0, 0, len(hidden) - count)), layer.output)
            hidden = self._feed_forward(hidden, index)

        logits = self._logits(hidden[_pad_rows(attention.last_rows).to(device)])
        used = attention.used
        return Prefill(keys[:, :, :, :used], values[:, :, :, :used], logits[: len(prompts)])

    def decode(self, tokens_A: Tensor, positions_A: Tensor, cache: KVCache, until: int) -> Tensor:
        """Logits ``[A, V]``, float32, of what follows ``tokens_A``, which stand at ``positions_A`` of lanes 0 to A-1.

        ``until`` is one past the largest position.
        """
        attend = cache.span(positions_A, until)
        hidden = F.embedding(tokens_A, self.weights.embedding)
        cos, sin = self._cos_sin[positions_A].unsqueeze(2).unbind(1)
        for index, layer in enumerate(self.weights.layers):
            hidden = add_product(hidden, attend(index, *self._project(hidden, index, cos, sin)), layer.output)
            hidden = self._feed_forward(hidden, index)
        return self._logits(hidden)

    def _project(self, hidden: Tensor, index: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[N, H, D]`` and keys ``[N, K, D]``, rotated where the layer does so, and values ``[N, K, D]``."""
        weights = self.weights
        layer = weights.layers[index]
        qkv = multiply(self._norm(hidden, layer.input_norm), layer.qkv)
        qk, value = qkv.view(len(qkv), -1, weights.head_dim).split_with_sizes(self._qk_and_v, 1)
        if layer.qk_norm is not None:
            qk = self._head_norm(qk, layer.qk_norm)
        if layer.rotated:
            qk = torch.addcmul(qk * cos, qk.roll(weights.head_dim // 2, -1), sin)
        query, key = qk.split_with_sizes(self._q_and_k, 1)
        return query, key, value

    def _feed_forward(self, hidden: Tensor, index: int) -> Tensor:
        layer = self.weights.layers[index]
        inner = self._norm(hidden, layer.mlp_norm)
        if not isinstance(layer.mlp, Mlp):
            return hidden + layer.mlp(inner.unsqueeze(0)).squeeze(0)
        gate, up = multiply(inner, layer.mlp.gate_up).chunk(2, 1)
        return add_product(hidden, self.weights.activation(gate).mul_(up), layer.mlp.down)

    def _logits(self, hidden: Tensor) -> Tensor:
        head, inner = self.weights.head, self._norm(hidden, self.weights.final_norm)
        if self._wide_output:
            head = Dense(head.weight_t.float(), None if head.bias is None else head.bias.float())
        logits = multiply(inner.to(head.weight_t.dtype), head).float()
        return logits if self._holes is None else logits.index_fill_(1, self._holes, -torch.inf)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._short_norm:
            return _rms_norm(x, weight, self._eps)
        return F.rms_norm(x, weight.shape, weight, self.weights.norm_eps)

    def _head_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._short_norm:
            return _rms_norm(x, weight, self._qk_eps)
        return F.rms_norm(x, weight.shape[-1:], None, self.weights.qk_norm_eps).mul_(weight)


def _rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """``x * rsqrt(mean(x²) + eps) * weight``, with one reduction and as few temporaries as torch allows."""
    norm = torch.linalg.vector_norm(x, 2, -1, keepdim=True)
    return (x * torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()).mul_(weight)


def _pad_rows(index: Tensor) -> Tensor:
    """``index`` lengthened with zeros to a multiple of the row quantum (see ``products``)."""
    return F.pad(index, (0, -len(index) % ROW_QUANTUM))
