"""A decoder of the Llama kind, read as the few matrices that its forward pass needs.

Projections that read the same input are joined into one matrix without a second copy of the weights:

    before   q_proj.weight -> storage 1     k_proj.weight -> storage 2     v_proj.weight -> storage 3
    after    q_proj.weight -> rows 0:Nq     k_proj.weight -> rows Nq:Nk    v_proj.weight -> rows Nk:  of ONE storage

The ``nn.Parameter`` objects stay the same, so optimizers, gradients, ``state_dict`` and copies in place go on as
before, and what they write is read through the joined matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

__all__ = ["DecoderWeights", "Dense", "LayerWeights", "Mlp", "Packed", "find_unsupported", "read_weights"]

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3")
_SAME_IN_ALL_LAYERS = ("mistral", "qwen3_moe")  # these read config.sliding_window and no config.layer_types
_KINDS = {"full_attention", "sliding_attention"}
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


class Packed(NamedTuple):
    """Rows ``start`` to ``stop`` of a ``weight_t``, in the order in which BLAS reads them.

    ``shape`` is a view of one number, which has their shape, transposed.
    """

    start: int
    stop: int
    matrix: Tensor
    shape: Tensor


@dataclass(eq=False, slots=True)
class Dense:
    """``y = x @ weight_t + bias``; ``weight_t [in, out]`` is the transposed view of the parameter.

    Attributes:
        blocks: By the number of rows of ``x``, in which blocks it is computed (see :mod:`.products`).
        packed: A copy of ``weight_t`` for at most 16 rows, in parts (see :mod:`.packing`); () where there is none.
        is_apart: Whether what is added to the product is added afterwards, rather than within it: the order of sums
            that products of packed matrices have.
    """

    weight_t: Tensor
    bias: Tensor | None
    blocks: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]], repr=False)
    packed: tuple[Packed, ...] = field(default=(), repr=False)
    is_apart: bool = False


@dataclass(frozen=True, slots=True)
class Mlp:
    """``down(activation(gate) * up)``, with gate and up joined."""

    gate_up: Dense
    down: Dense


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer.

    Attributes:
        qk_norm: A copy ``[heads + kv_heads, head_dim]``, made anew at every refresh.
        mlp: The model's own module ``[1, N, E] -> [1, N, E]`` where experts share the work.
        window: A token attends to as many positions, its own among them; None means all before it.
        rotated: Whether queries and keys are rotated by their positions.
    """

    input_norm: Tensor
    qkv: Dense
    qk_norm: Tensor | None
    output: Dense
    mlp_norm: Tensor
    mlp: Mlp | nn.Module
    window: int | None
    rotated: bool


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole decoder: views of the model's own parameters, except ``qk_norm``, and its own modules of experts.

    ``rotary(length)`` gives cosine and sine tables ``[length, head_dim]`` of the model's own rotary module.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Dense
    activation: Callable[[Tensor], Tensor]
    rotary: Callable[[int], tuple[Tensor, Tensor]]
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    qk_norm_eps: float

    @property
    def shared(self) -> list[Tensor]:
        """The views of the model's parameters that a forward pass reads."""
        tensors = [self.embedding, self.final_norm, self.head.weight_t, self.head.bias]
        for layer in self.layers:
            tensors += [layer.input_norm, layer.mlp_norm]
            dense = [
                layer.qkv,
                layer.output,
                *((layer.mlp.gate_up, layer.mlp.down) if isinstance(layer.mlp, Mlp) else ()),
            ]
            tensors += [tensor for linear in dense for tensor in (linear.weight_t, linear.bias)]
        return [tensor for tensor in tensors if tensor is not None]

    @property
    def dense(self) -> list[Dense] | None:
        """All its matrices but the embedding; None where experts have others."""
        matrices = [self.head]
        for layer in self.layers:
            if not isinstance(layer.mlp, Mlp):
                return None
            matrices += [layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down]
        return matrices

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def find_unsupported(model: nn.Module) -> str | None:
    """Why the native engine cannot run ``model``, or None when it can."""
    config: Any = getattr(model, "config", None)
    family = getattr(config, "model_type", type(model).__name__)
    if family not in _FAMILIES:
        return f"its architecture is {family}, not one of {', '.join(_FAMILIES)}"
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in _STATIC_ROPE:
        return f"its rotary embedding is {rope!r}, whose frequencies depend on the sequence's length"
    if others := sorted({*(getattr(config, "layer_types", None) or ())} - _KINDS):
        return f"some of its layers are of the kind {', '.join(others)}"
    for name, module in model.named_modules():
        if (name.endswith("_proj") and type(module) is not nn.Linear) or hasattr(module, "base_layer"):
            return f"{name} is a {type(module).__name__}, not a plain linear layer (merge adapters first)"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "its parameters are on several devices"
    return None


def read_weights(model: Any, limit: int | None = None) -> DecoderWeights:
    """Read ``model``, a decoder for which ``unsupported`` is None, and join its projections.

    With ``limit``, the head gives logits of that many ids only.

    Call it again after something replaced the parameters' data, as ``load_state_dict(assign=True)`` does.
    """
    config, decoder = model.config, model.model
    attention = decoder.layers[0].self_attn
    head_dim = attention.head_dim
    rotary = decoder.rotary_emb

    def tables(length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=decoder.embed_tokens.weight.device).unsqueeze(0)
        cos, sin = rotary(decoder.embed_tokens.weight[:1], positions)
        return cos[0], sin[0]

    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return DecoderWeights(
        embedding=decoder.embed_tokens.weight.data,
        layers=tuple(
            _read_layer(layer, heads, kv_heads, window)
            for layer, window in zip(decoder.layers, _windows(config), strict=True)
        ),
        final_norm=decoder.norm.weight.data,
        head=_dense(model.lm_head, limit),
        activation=F.silu if config.hidden_act == "silu" else ACT2FN[config.hidden_act],
        rotary=tables,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=decoder.norm.variance_epsilon,
        qk_norm_eps=getattr(getattr(attention, "q_norm", None), "variance_epsilon", 0.0),
    )


def _windows(config: Any) -> list[int | None]:
    """The window of each layer, None where it attends to all positions."""
    if config.model_type in _SAME_IN_ALL_LAYERS:
        return [config.sliding_window] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def _read_layer(layer: Any, heads: int, kv_heads: int, window: int | None) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    qk_norm = None
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm.weight.data, attention.k_norm.weight.data
        qk_norm = torch.cat((query.expand(heads, -1), key.expand(kv_heads, -1)))
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.data,
        qkv=_join_dense(attention.q_proj, attention.k_proj, attention.v_proj),
        qk_norm=qk_norm,
        output=_dense(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.data,
        mlp=mlp if hasattr(mlp, "experts") else Mlp(_join_dense(mlp.gate_proj, mlp.up_proj), _dense(mlp.down_proj)),
        window=window,
        rotated=bool(getattr(attention, "use_rope", True)),
    )


def _dense(linear: nn.Linear, limit: int | None = None) -> Dense:
    bias: nn.Parameter | None = linear.bias
    return Dense(linear.weight.data[:limit].t(), None if bias is None else bias.data[:limit])


def _join_dense(*linears: nn.Linear) -> Dense:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return Dense(_join([linear.weight for linear in linears]).t(), _join(biases) if biases else None)


def _join(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor over the rows of ``parameters``, which become views of it unless they are already."""
    first = parameters[0].data
    address, is_whole = first.data_ptr(), True
    for part in parameters:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        is_whole = is_whole and same and part.data_ptr() == address and part.is_contiguous()
        address += part.numel() * part.element_size()
    if is_whole:
        shape = (sum(map(len, parameters)), *first.shape[1:])
        return first.as_strided(shape, first.stride(), first.storage_offset())
    # A storage made in inference mode could never be trained again.
    with torch.inference_mode(False), torch.no_grad():
        joined = torch.cat([parameter.data for parameter in parameters])
        for parameter, view in zip(parameters, joined.split([len(part) for part in parameters]), strict=True):
            parameter.data = view
    return joined
