"""The memory of a forward and backward pass, counted by making the pass over tensors without elements.

torch's fake tensors have shapes and no bytes. Each operation of the pass makes some, and they live as long as those of
a real pass would, so that counting them gives what a real pass holds. Kernels' own workspaces are not seen.

On a CPU, malloc keeps small blocks once they are freed, and returns large ones. So a process has the most that small
blocks ever took beside the most that large ones took, although these are not there at the same time: activations are
small, and the gradient of an embedding, which comes when they are gone, is large.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from podium.algorithms import AlgorithmConfig, LossInputs, policy_loss
from podium.algorithms.token_rows import rows_of_tokens
from podium.data import fields
from podium.devices import autocast
from podium.exceptions import describe_error
from podium.models.loading import plain_model
from podium.training.micro_batches import MicroBatch
from podium.training.output_layer import LogitsTail, TokenScores, output_scores, replace_forward
from podium.training.scoring import ValueRequest, output_layer, run_model
from podium_dryrun.memory import column_widths

__all__ = ["PassMemory", "count_pass"]

_log = logging.getLogger("podium")

_CPU: Final = torch.device("cpu")
_NUMBERS: Final = (
    *(fields.ADVANTAGES, fields.OLD_LOGPROBS, fields.ROLLOUT_LOGPROBS),
    *(fields.REF_LOGPROBS, fields.TEACHER_LOGPROBS),
)


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
    algorithm: AlgorithmConfig | None = None,
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
        algorithm: The loss of the tokens with its options; by default the sum of their log-probabilities.

    Raises:
        Exception: Whatever the model raises whose path depends on values, such as one that chooses experts. Of a loss
            whose path does, only what it reads is counted.
    """
    row_N = rows_of_tokens(micro.offsets)
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
            loss = _make_pass(model, micro, row_N, precision, algorithm, scores=scores)
            activations = sum(count.nbytes)
            loss.backward()
    return PassMemory(activations, sum(count.most) - activations)


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _make_pass(
    model: nn.Module,
    micro: MicroBatch,
    row_N: Tensor,
    precision: torch.dtype,
    algorithm: AlgorithmConfig | None,
    *,
    scores: bool,
) -> Tensor:
    layer, hidden, token_scores = output_layer(model), list[Tensor](), list[TokenScores]()
    widths = {} if algorithm is None else column_widths(algorithm)
    ids_KJ = torch.zeros(len(micro.targets), sum(widths.values()) // 2, dtype=torch.int64) if widths else None

    def score(hidden_1KH: Tensor) -> Tensor:
        if scores:
            options: dict[str, Any] = {"tail": LogitsTail(), "entropy": True, "chosen_KJ": ids_KJ}
            if algorithm is not None:
                options["entropy_grad"] = algorithm.entropy_coef != 0
            token_scores.append(output_scores(hidden_1KH[0], layer, micro.targets, forward=former_forward, **options))
        else:
            hidden.append(hidden_1KH.float())
        return hidden_1KH[..., :0].clone()

    request = ValueRequest(grad=algorithm is not None and algorithm.critic.critic_trunk == "shared")
    with autocast(_CPU, precision):
        with replace_forward(layer, score) as former_forward:
            loss = run_model(model, micro, request).logits.sum() + request.nothing
        if hidden:
            return hidden[0].sum() + loss
        if algorithm is None:
            return token_scores[0].logprobs.sum() + loss
        return _sum_losses(micro, token_scores[0], widths, algorithm, row_N) + loss


def _sum_losses(
    micro: MicroBatch, scores: TokenScores, widths: Mapping[str, int], algorithm: AlgorithmConfig, row_N: Tensor
) -> Tensor:
    """The sum of the tokens' losses, which reads columns as those of a real batch."""
    columns = {name: torch.zeros(len(micro.targets)) for name in _NUMBERS}
    columns |= {name: torch.zeros(len(micro.targets), width) for name, width in widths.items()}
    if scores.chosen is not None:
        parts = scores.chosen.split([width // 2 for width in widths.values()], -1)
        columns |= {f"at_{name}": part for name, part in zip(widths, parts, strict=True)}
    assert scores.entropy is not None
    columns |= {"tokens": micro.targets, "logprobs": scores.logprobs, "entropy": scores.entropy}
    inputs = LossInputs(offsets_B1=micro.offsets, columns=columns)
    vars(inputs)["row_N"] = row_N  # the one figure of the inputs whose length depends on values
    try:
        return policy_loss(inputs, algorithm).loss_N.sum()
    except Exception as error:  # noqa: BLE001 - whatever a loss raises that looks at values
        _log.debug("the loss %s is estimated by its columns: %s", algorithm.loss, describe_error(error))
        return scores.logprobs.sum() + sum(part.sum() for part in (scores.chosen,) if part is not None)


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
