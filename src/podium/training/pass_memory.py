"""The memory of a forward and backward pass, counted by making the pass over tensors without elements.

torch's fake tensors have shapes and no bytes. Each operation of the pass makes some, and they live as long as those of
a real pass would, so that counting them gives what a real pass holds. Kernels' own workspaces are not seen.

On a CPU, malloc keeps small blocks once they are freed, and returns large ones. So a process has the most that small
blocks ever took beside the most that large ones took, although these are not there at the same time: activations are
small, and the gradient of an embedding, which comes when they are gone, is large.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from podium.devices import autocast
from podium.models.loading import plain_model
from podium.training.micro_batches import MicroBatch
from podium.training.output_layer import LogitsTail, output_scores, replace_forward
from podium.training.scoring import output_layer, run_model

__all__ = ["PassMemory", "count_pass"]

_CPU: Final = torch.device("cpu")


class PassMemory(NamedTuple):
    """Bytes beside the parameters and the gradients that outlast the pass.

    Attributes:
        activations: What the backward pass needs of the forward pass, and the forward pass has made.
        working: What is there besides: temporary tensors, gradients on their way, and small blocks that are free.
    """

    activations: int
    working: int


def count_pass(
    model: nn.Module,
    micro: MicroBatch,
    precision: torch.dtype,
    *,
    scores: bool = True,
    keeps_gradients: bool = True,
    kept_bytes: int = 0,
) -> PassMemory:
    """Count the memory of a pass of ``model``, which is on meta and cannot be used afterwards.

    Args:
        micro: Rows on the CPU.
        precision: The data type of matrix products.
        scores: Whether the log-probabilities and entropies of tokens are computed; else the last hidden states are
            the output, as those that a scalar head reads.
        keeps_gradients: Whether float32 gradients are added to those of the step where they arise. Others are moved
            away at once.
        kept_bytes: Blocks of fewer bytes are not returned to the system once they are freed.

    Raises:
        Exception: Whatever the model raises whose path depends on values, such as one that chooses experts.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device=_CPU)
        plain: Any = plain_model(model)
        plain.tie_weights()  # which moving has torn apart
        model.eval()
        for parameter in model.parameters():
            if parameter.requires_grad:
                if keeps_gradients and parameter.dtype == torch.float32:
                    parameter.grad = torch.zeros_like(parameter)
                else:
                    parameter.register_post_accumulate_grad_hook(_forget)
        count = _Count(
            kept_bytes,
            [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)],
        )
        with count:
            loss = _make_pass(model, micro, precision, scores=scores)
            activations = sum(count.nbytes)
            loss.backward()
    return PassMemory(activations, sum(count.most) - activations)


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _make_pass(model: nn.Module, micro: MicroBatch, precision: torch.dtype, *, scores: bool) -> Tensor:
    layer, parts = output_layer(model), list[Tensor]()

    def score(hidden_1KH: Tensor) -> Tensor:
        if scores:
            token_scores = output_scores(
                hidden_1KH[0], layer, micro.targets, tail=LogitsTail(), entropy=True, forward=former_forward
            )
            parts.append(token_scores.logprobs)
        else:
            parts.append(hidden_1KH.float())
        return hidden_1KH[..., :0].clone()

    with autocast(_CPU, precision):
        with replace_forward(layer, score) as former_forward:
            nothing = run_model(model, micro).logits.sum()
        return parts[0].sum() + nothing


class _Count(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, as long as these live.

    Attributes:
        nbytes: Bytes now in blocks of fewer bytes than ``kept_bytes``, and in others.
        most: The most of each so far.
    """

    def __init__(self, kept_bytes: int, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.nbytes, self.most, self._kept_bytes = [0, 0], [0, 0], kept_bytes
        self._sizes: dict[int, int] = {}
        for tensor in known:
            self._note(tensor, 0)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf, leaf.untyped_storage().nbytes())
        return result

    def _note(self, tensor: Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = nbytes
            kind = int(nbytes >= self._kept_bytes)
            self.nbytes[kind] += nbytes
            self.most[kind] = max(self.most[kind], self.nbytes[kind])
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        nbytes = self._sizes.pop(key)
        self.nbytes[int(nbytes >= self._kept_bytes)] -= nbytes
