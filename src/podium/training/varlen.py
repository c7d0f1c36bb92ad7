"""Attention over rows packed end to end, as an attention implementation that transformers' models can use.

It is switched on for one forward pass at a time, so that generation with the same model keeps its own implementation.
Half precision on CUDA uses torch's variable-length flash kernel, where torch has it. Everything else goes row by row
through scaled dot product attention, which is slower and gives the same results.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from podium.errors import ConfigError
from podium.models.attention import unknown_keywords
from podium.models.loading import attention_implementation, plain_model
from podium.training.micro_batches import PackedRows
from podium.training.shared_prompts import SharedPrompts, attend_shared

NAME: Final = "podium_varlen"
_OWN_PACKING: Final = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


class Bounds(NamedTuple):
    """Where rows begin among queries and among keys, and the most of either in a row. The last of both are the same
    token."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


@contextmanager
def packed_attention(model: nn.Module, rows: PackedRows | SharedPrompts) -> Iterator[dict[str, Any]]:
    """Let the model attend within packed rows, and yield the keyword arguments that its forward pass needs.

    The caller passes ``position_ids``, ``use_cache=False`` and no attention mask: with a mask, transformers silently
    takes the packed rows for a single one.
    """
    _register()
    config: Any = plain_model(model).config
    implementation: str = config._attn_implementation
    if isinstance(rows, SharedPrompts):
        with attention_implementation(config, NAME):
            yield {"shared_prompts": rows}
        return
    with attention_implementation(config, implementation if implementation in _OWN_PACKING else NAME):
        yield {
            "cu_seq_lens_q": rows.offsets,
            "cu_seq_lens_k": rows.offsets,
            "max_length_q": rows.longest,
            "max_length_k": rows.longest,
        }


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    is_causal: bool | None = None,
    shared_prompts: SharedPrompts | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query ``[1, heads, T, D]``, key and value ``[1, kv heads, T, D]`` -> ``[1, T, heads, D]``.

    ``attention_mask`` is what :func:`_local_size` returned.

    Raises:
        ConfigError: The layer asks for something that this function does not compute.
    """
    if shared_prompts is None and (cu_seq_lens_q is None or max_length_q is None):
        raise ConfigError(f"{type(module).__name__} does not hand the bounds of packed rows to its attention")
    unknown = unknown_keywords(others)
    if attention_mask is not None and not (isinstance(attention_mask, int) and attention_mask == sliding_window):
        unknown.append("a mask of its own")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        unknown.append("attention to later tokens")
    if unknown:
        raise ConfigError(f"{type(module).__name__} needs {', '.join(unknown)}, which attention over packed rows lacks")
    if torch.is_autocast_enabled(query.device.type):  # rotation leaves query and key in another dtype than value
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and not dropout and (kernel := _kernel()):
        if shared_prompts is not None:
            keys, values = (states.index_select(2, shared_prompts.key_places) for states in (key, value))
            bounds = Bounds(shared_prompts.offsets, shared_prompts.key_offsets, *shared_prompts.longest)
        else:
            assert cu_seq_lens_q is not None
            assert max_length_q is not None
            keys, values = key, value
            bounds = Bounds(cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        out = _flash(kernel, query, keys, values, bounds, scaling, sliding_window)
        if out is not None:
            return out[None], None
    if shared_prompts is not None:
        return attend_shared(query, key, value, shared_prompts, dropout, scaling, sliding_window), None
    assert cu_seq_lens_q is not None
    lengths = cu_seq_lens_q.diff().tolist()
    rows = zip(*(torch.split(states, lengths, dim=2) for states in (query, key, value)), strict=True)
    parts = [_attend_row(q, k, v, dropout, scaling, sliding_window) for q, k, v in rows]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _attend_row(q: Tensor, k: Tensor, v: Tensor, dropout: float, scaling: float | None, window: int | None) -> Tensor:
    length, mask = q.shape[2], None
    if window is not None and length > window:
        distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)[None, :]
        mask = (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )


def _flash(
    kernel: Callable[..., object],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Bounds,
    scaling: float | None,
    window: int | None,
) -> Tensor | None:
    """Call torch's kernel as its signature wants it. None where it has no windows, and the layer needs one.

    torch 2.10 knows ``is_causal`` alone, 2.11 scales and windows, and 2.12 fewer heads of key and value than of query.
    """
    parameters = signature(kernel).parameters
    query, key, value = (states[0].transpose(0, 1) for states in (q, k, v))
    keywords: dict[str, Any] = {}
    if "window_size" in parameters:
        keywords["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None or bounds.most_keys <= window:
        keywords["is_causal"] = True
    else:
        return None
    if "scale" in parameters:
        keywords["scale"] = scaling
    elif scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in parameters:
            keywords["enable_gqa"] = True
        else:
            times = query.shape[1] // key.shape[1]
            key, value = (states.repeat_interleave(times, dim=1) for states in (key, value))
    out = kernel(query, key, value, *bounds, **keywords)
    assert isinstance(out, Tensor)
    return out


@cache
def _kernel() -> Callable[..., object] | None:
    """torch's attention over packed rows, which 2.9 does not have."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def _local_size(*, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> int | None:
    """Stand for the mask of a layer: the number of tokens that it sees where that is limited, else None.

    Transformers makes masks for windows and for chunks, and only windows come to :func:`_attend` by keyword too.
    """
    if use_vmap:
        raise ConfigError("the model makes its own attention mask, which attention over packed rows does not support")
    return local_size


@cache
def _register() -> None:
    """Make the implementation known to transformers, whose attention is imported with its model classes."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _local_size)
