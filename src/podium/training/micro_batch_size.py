"""The most tokens of a forward pass, where the configuration leaves the choice to Podium.

A CPU takes few tokens at a time, since larger micro-batches save it nothing. An accelerator takes many: a micro-batch
of few tokens ends before the processor has started the kernels of the next layers, and each micro-batch converts all
weights and adds to all gradients once more. On an H100 the kernels of a micro-batch of 4096 tokens of a model of 0.5
billion parameters took 88 ms, and their start 208 ms.

The choice follows from the model's shape and from the size of the device, so that all runs on like machines make the
same micro-batches.
"""

from typing import Any, Final

import torch
from torch import nn

from podium.devices import total_memory_bytes
from podium.models.loading import plain_model
from podium.training.config import LEAST_MICRO_BATCH_TOKENS, ParallelConfig

_MOST: Final = 16_384  # beyond it, starting kernels and adding gradients cost little
_QUANTUM: Final = 1024
_SHARE: Final = 1 / 3  # of the memory that is left; engines, other roles and the allocator need the rest
_EXACT: Final = 4  # bytes of a float32


def choose_micro_batch_tokens(
    model: nn.Module,
    config: ParallelConfig,
    device: torch.device,
    precision: torch.dtype,
    *,
    trains: bool,
    world_size: int = 1,
) -> int:
    """Return the most tokens of a forward pass, padding included: what ``config`` says, or what the device has room
    for, from ``LEAST_MICRO_BATCH_TOKENS`` up.

    Args:
        precision: The data type of the activations.
        trains: Whether activations are kept for a backward pass, and gradients and an optimizer stand beside the model.
        world_size: The ranks that share the model's state where ``config.strategy`` shards it.
    """
    if config.micro_batch_tokens is not None:
        return config.micro_batch_tokens
    total, numbers = total_memory_bytes(device), _count_numbers(model)
    if total is None or numbers is None:
        return LEAST_MICRO_BATCH_TOKENS
    if not trains:
        return _MOST
    room = (total - _state_bytes(model) / (world_size if config.strategy == "fsdp2" else 1)) * _SHARE
    tokens = int(room / (numbers * precision.itemsize)) // _QUANTUM * _QUANTUM
    return min(max(tokens, LEAST_MICRO_BATCH_TOKENS), _MOST)


def activation_numbers(*, hidden: int, query_width: int, key_value_width: int, inner: int) -> int:
    """Return how many numbers a backward pass needs of a layer of the Llama kind, for each token: the residual stream,
    the normalized and the scaled input of attention and of the MLP, query, key and value, what attention gives, and
    four inner vectors of the MLP."""
    return 6 * hidden + 2 * query_width + 2 * key_value_width + 4 * inner


def _count_numbers(model: nn.Module) -> int | None:
    """The numbers of all layers, for each token, as if no layer was computed again in the backward pass; None for a
    model whose configuration does not have them all."""
    config: Any = getattr(plain_model(model), "config", None)
    config = config.get_text_config() if config is not None else None
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    sizes: list[Any] = [getattr(config, name, None) for name in names]
    if not all(isinstance(size, int) and size for size in sizes):
        return None
    hidden, layers, heads = sizes
    width = getattr(config, "head_dim", None) or hidden // heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None) or 4 * hidden
    inner *= getattr(config, "num_experts_per_tok", None) or 1
    layer = activation_numbers(
        hidden=hidden, query_width=heads * width, key_value_width=key_value_heads * width, inner=inner
    )
    return layers * layer


def _state_bytes(model: nn.Module) -> int:
    """Bytes of the weights and, for those that are trained, of float32 numbers: a gradient, two moments, and a copy of
    what is narrower."""
    nbytes = 0
    for weight in model.parameters():
        copies = 3 + (weight.element_size() < _EXACT) if weight.requires_grad else 0
        nbytes += weight.numel() * (weight.element_size() + copies * _EXACT)
    return nbytes
