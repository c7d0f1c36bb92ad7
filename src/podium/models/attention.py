"""The attention implementation that a model needs, found by a look at what its layers hand to attention.

Layers give their attention function query, key, value and a mask, and further keywords. An attention function of
transformers ignores keywords that it does not know, such as a soft cap under ``sdpa``, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from transformers.utils.generic import TransformersKwargs

from podium.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KNOWN: Final = frozenset(
    {
        *TransformersKwargs.__annotations__,  # what a forward pass takes and hands on to all layers
        *("dropout", "scaling", "sliding_window", "use_cache", "cache_position", "return_dict"),
    }
)


def unknown_keywords(keywords: Mapping[str, Any]) -> list[str]:
    """Return the names of keywords that change attention in a way that plain attention does not know."""
    return sorted(name for name, value in keywords.items() if value is not None and name not in _KNOWN)


def choose_attention(model: PreTrainedModel, wish: str) -> bool:
    """Let the model use the attention implementation ``wish``; "auto" means ``sdpa`` where that gives right results.

    Where layers hand ``sdpa`` something that it leaves out, "auto" means ``eager``. A forward pass over two tokens
    shows what they hand over, also on meta.

    Returns:
        Whether this is settled. Some models on meta cannot be tried.

    Raises:
        ConfigError: ``wish`` is ``sdpa``, which leaves something out.
    """
    if model.config._attn_implementation != "sdpa":
        return True
    try:
        left_out = _find_left_out_by_sdpa(model)
    except Exception:
        if model.device.type != "meta":
            raise
        return False  # it looks at values, which are not there
    if left_out and wish != "auto":
        raise ConfigError(
            f"model.attention={wish!r} leaves out {left_out} of {type(model).__name__}, which changes its results; use "
            "auto, eager or, on accelerators, flex_attention"
        )
    if left_out:
        model.set_attn_implementation("eager")
    return True


def _find_left_out_by_sdpa(model: PreTrainedModel) -> str:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ids, unknown = torch.arange(2, device=model.device)[None], dict[str, None]()
    # A whole mask is taken as it is; without one, transformers looks for packed rows in the positions' values.
    arguments = {"attention_mask": torch.zeros(1, 1, 2, 2, device="meta")} if model.device.type == "meta" else {}

    def watch(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
    ) -> tuple[Tensor, None]:
        foreign = {**keywords, "position_bias": None, "cache": None}  # sdpa knows both
        unknown.update(dict.fromkeys(unknown_keywords(foreign)))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **keywords)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = watch
    try:
        with torch.no_grad():  # to the end of the pass: ranks that share the model stay in step
            model(input_ids=ids, use_cache=False, **arguments)
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]  # the library's own is there again
    return ", ".join(unknown)
