"""Tiny twins of models, in which short texts pass the lengths at which a model computes something else.

Windows and chunks of attention, or a temperature that grows with the position, begin at thousands of tokens. A trial
with a few short texts says nothing about them. A twin has the architecture of a model with random weights, few narrow
layers, and such lengths of a few tokens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, cast

import torch

if TYPE_CHECKING:
    from torch import nn

SHORT: Final = 4
"""The lengths of a twin, in tokens."""

_LENGTH: Final = re.compile(
    r"window|chunk_size|chunk_length|floor_scale|^index_topk$|topk_blocks|local_blocks|block_size|stride|compress_r"
    r"|max_span"
)
_ORIGINAL: Final = "original_max_position_embeddings"
_OTHER: Final = re.compile(r"layers|pattern|feed_forward|conv|^num_|^use_")
_WIDTHS: Final = re.compile(r"intermediate_size|^ffn_dim$|^d_ff$|^n_inner$")
_EXPERTS: Final = re.compile(r"^(num|n)_(\w+_)?experts$")
_VOCABULARY: Final = 128
_WIDTH: Final = 64
_MOST_LAYERS: Final = 8  # a period of layers of several kinds
_MOST_EXPERTS: Final = 16
_HEADS: Final = 4


def make_short_twin(model: Any) -> nn.Module | None:
    """Return a tiny twin of the model's language model in float32 on the CPU, in which such lengths are ``SHORT``; None
    if the model's configuration has none.

    Raises:
        Exception: Whatever an architecture raises that cannot be so small.
    """
    from transformers import AutoModelForCausalLM

    settings: Any = copy.deepcopy(model.config.get_text_config())
    if not _shorten(settings):
        return None
    _make_narrow(settings)
    _keep_few_layers(settings)
    attention = getattr(model.config, "_attn_implementation", None)
    attention = attention if attention in ("eager", "sdpa") else "eager"
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        twin: Any = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation=attention)
    return twin.eval().requires_grad_(False)


def _shorten(settings: Any) -> list[str]:
    """Make the lengths of a configuration short, and return their names."""
    names = [name for name, value in vars(settings).items() if _is_length(name, value)]
    for name in names:
        setattr(settings, name, SHORT)
    for part in _find_rotations(getattr(settings, "rope_parameters", None)):
        if part.get("llama_4_scaling_beta"):  # a temperature; no other kind but longrope's reads the length later
            part[_ORIGINAL] = SHORT
            names.append(_ORIGINAL)
    return names


def _find_rotations(parameters: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of rotary positions, which may be apart for each kind of layers."""
    if isinstance(parameters, dict):
        yield cast("dict[str, Any]", parameters)
        for part in cast("dict[str, Any]", parameters).values():
            yield from _find_rotations(part)


def _is_length(name: str, value: Any) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value > SHORT
    return is_number and _LENGTH.search(name) is not None and _OTHER.search(name) is None


def _make_narrow(settings: Any) -> None:
    """Give a configuration few heads, experts and tokens. The size of a head stays, since rotations divide it."""
    heads, shared = _read(settings, "num_attention_heads"), _read(settings, "num_key_value_heads")
    size = _read(settings, "head_dim") or settings.hidden_size // heads
    few = min(heads, _HEADS)
    settings.num_attention_heads, settings.hidden_size = few, few * size
    if shared is not None:
        settings.num_key_value_heads = few if shared == heads else 1
    for name, value in list(vars(settings).items()):
        if isinstance(value, list) and _WIDTHS.search(name):  # of each layer
            setattr(settings, name, [min(size, _WIDTH) for size in cast("list[int]", value)])
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if _WIDTHS.search(name):
            setattr(settings, name, min(value, _WIDTH))
        elif _EXPERTS.search(name):
            setattr(settings, name, min(value, _MOST_EXPERTS))
        elif name.startswith("vocab_size"):
            setattr(settings, name, min(value, _VOCABULARY))
    for name in [
        name for name in ("pad_token_id", "bos_token_id", "eos_token_id") if _read(settings, name) is not None
    ]:
        setattr(settings, name, 0)
    settings.initializer_range = settings.hidden_size**-0.5


def _keep_few_layers(settings: Any) -> None:
    """Take the later layers out of a configuration, also where a list says something of each."""
    count = settings.num_hidden_layers
    if count <= _MOST_LAYERS:
        return
    for name, value in list(vars(settings).items()):
        if isinstance(value, list) and len(cast("list[Any]", value)) == count:
            setattr(settings, name, value[:_MOST_LAYERS])
    settings.num_hidden_layers = _MOST_LAYERS
    if _read(settings, "num_kv_shared_layers"):  # the last layers, of which there are fewer now
        settings.num_kv_shared_layers = 0


def _read(settings: Any, name: str) -> Any:
    """Return a field of a configuration, None if there is none. Where layers differ, it is that of most layers."""
    return vars(settings)[name] if name in vars(settings) else getattr(settings, name, None)
