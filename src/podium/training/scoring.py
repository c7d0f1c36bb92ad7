"""Log-probabilities and entropies of a micro-batch's tokens under a causal language model.

Legend: K tokens with loss, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from podium.data import Batch, fields
from podium.data.masks import read_mask_columns
from podium.errors import ConfigError, DataError
from podium.models.loading import plain_model
from podium.models.value_head import find_value_head, run_value_head
from podium.training.micro_batches import MicroBatch
from podium.training.output_layer import (
    KeptTokens,
    LogitsTail,
    MaskedTokens,
    TextIds,
    TokenScores,
    logits_tail,
    output_scores,
    replace_forward,
    widened_forward,
)
from podium.training.varlen import packed_attention


def kept_tokens(batch: Batch, micro: MicroBatch) -> KeptTokens | None:
    """Return the kept sets of the micro-batch's tokens; None where the batch records none.

    Raises:
        DataError: A token with loss has no set, or the sets are not those of this batch.
    """
    if fields.KEPT_SIZES not in batch:
        return None
    sizes_N, ids = batch.jagged(fields.KEPT_SIZES).values, batch.jagged(fields.KEPT_IDS).values
    ends_N = sizes_N.cumsum(0)
    index_K = micro.index.to(sizes_N.device)
    sizes_K = sizes_N[index_K]
    if len(ids) != int(sizes_N.sum()) or bool((sizes_K == 0).any()):
        raise DataError(
            f"{int((sizes_K == 0).sum())} of {len(sizes_K)} tokens with loss have no kept set, and the {len(ids)} "
            f"{fields.KEPT_IDS} stand for {int(sizes_N.sum())}: only sampled tokens have a kept set. Set no "
            f"{fields.LOSS_MASK} for other tokens, and change both columns together"
        )
    token_S = torch.repeat_interleave(torch.arange(len(sizes_K), device=sizes_N.device), sizes_K)
    within_S = torch.arange(len(token_S), device=sizes_N.device) - (sizes_K.cumsum(0) - sizes_K)[token_S]
    ids_S = ids[(ends_N[index_K] - sizes_K)[token_S] + within_S]
    device = micro.targets.device
    return KeptTokens(ids_S.to(device), token_S.to(device))


def token_masks(batch: Batch, micro: MicroBatch) -> MaskedTokens | None:
    """Return the masks of the micro-batch's tokens; None where each token was drawn from all ids.

    Raises:
        DataError: The masks are not those of this batch.
    """
    columns = read_mask_columns(batch)
    if columns is None:
        return None
    masks, number_N = columns
    device = micro.targets.device
    return MaskedTokens(masks.to(device), number_N[micro.index.to(number_N.device)].to(device))


def score_tokens(
    model: nn.Module,
    batch: Batch,
    micro: MicroBatch,
    *,
    entropy: bool = False,
    entropy_grad: bool = False,
    best: bool = False,
    squares: bool = False,
    chosen_KJ: Tensor | None = None,
    top: int = 0,
    value_grad: bool = False,
) -> TokenScores:
    """Make one forward pass over a micro-batch of ``batch``. Logits exist for a few tokens at a time.

    The scores are those of the distribution that was sampled from: at ``batch.meta["temperature"]`` (1 if not given; 0,
    greedy sampling, counts as 1), over the ids of ``batch.meta["text_ids"]`` (all if not given; see
    :class:`.TextIds`), and, where the batch has kept sets (``kept_sizes``) or masks (``mask_numbers``), over those.

    Args:
        entropy: Whether the entropy is computed too, without gradients unless ``entropy_grad``.
        best: Whether the log-probability of the most probable token is read too. The batch then has no kept sets.
        squares: Whether the sum of squared probabilities is computed too, in place of ``best``.
        chosen_KJ: As of :func:`.output_scores`, and ``top`` too.
        value_grad: Whether the model, and not its value head alone, has the gradient of the head's ``values``.

    Raises:
        DataError: see :func:`kept_tokens` and :func:`token_masks`.
    """
    temperature = float(batch.meta.get("temperature", 1.0)) or 1.0
    kept = kept_tokens(batch, micro)
    tail, request = logits_tail(model), ValueRequest(grad=value_grad)
    options = {
        "temperature": temperature,
        "kept": kept,
        "masked": token_masks(batch, micro) if kept is None else None,
        "text_ids": TextIds(*batch.meta.get("text_ids") or ()),
        "entropy": entropy,
        "entropy_grad": entropy_grad,
        "best": best,
        "squares": squares,
        "chosen_KJ": chosen_KJ,
        "top": top,
    }
    if tail is None:  # the model changes the layer's values in a way of its own, so that it has to see them all
        logits = run_model(model, micro, request).logits[0]
        scores = output_scores(logits, nn.Identity(), micro.targets, tail=LogitsTail(), **options)
        return scores._replace(values=request.values)
    layer = output_layer(model)
    parts = list[TokenScores]()

    def score(hidden_1KH: Tensor) -> Tensor:
        """Score the tokens in the layer's place, and return no logits."""
        parts.append(output_scores(hidden_1KH[0], layer, micro.targets, tail=tail, forward=former_forward, **options))
        return hidden_1KH[..., :0].clone()  # FSDP warns of views

    with replace_forward(layer, score) as former_forward:
        nothing = run_model(model, micro, request).logits.sum()  # 0, of the model's output: FSDP waits for that
    (scores,) = parts
    entropies = scores.entropy
    if entropies is not None and entropies.requires_grad:
        entropies = entropies + nothing
    chosen = None if scores.chosen is None else scores.chosen + nothing
    if request.values is not None:
        nothing = nothing + request.nothing  # all passes of all ranks have a gradient of the head, as FSDP needs it
    return scores._replace(logprobs=scores.logprobs + nothing, entropy=entropies, chosen=chosen, values=request.values)


def score_values(model: nn.Module, micro: MicroBatch, *, value_grad: bool = False) -> Tensor:
    """Return the values by the model's head before the micro-batch's tokens, float32 ``[K]``, and compute no logits."""
    request = ValueRequest(grad=value_grad)
    if logits_tail(model) is None:
        nothing = run_model(model, micro, request).logits.sum() * 0.0
    else:
        with replace_forward(output_layer(model), lambda hidden: hidden[..., :0].clone()):
            nothing = run_model(model, micro, request).logits.sum()
    assert request.values is not None  # the caller knows that there is a head
    return request.values + nothing


def zero_of(model: nn.Module, micro: MicroBatch) -> Tensor:
    """Make a forward pass, and return 0 with a gradient of all that is trained."""
    request = ValueRequest()
    return run_model(model, micro, request).logits.sum() * 0.0 + request.nothing


@dataclass
class ValueRequest:
    """What a forward pass reads from the model's value head.

    Attributes:
        grad: Whether the model, and not its value head alone, has the gradient of the values.
        values: The values of the K tokens, float32 ``[K]``; None where the model has no such head.
    """

    grad: bool = False
    values: Tensor | None = None

    @property
    def nothing(self) -> Tensor | float:
        """0, which depends on the values."""
        return 0.0 if self.values is None else self.values.sum() * 0.0


def run_model(model: nn.Module, micro: MicroBatch, request: ValueRequest | None = None) -> Any:
    """Return the model's output for the micro-batch. Its logits are ``[1, K, V]``. ``request`` gets its values."""
    head, value_head = output_layer(model), find_value_head(model)

    def choose(module: nn.Module, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """Give the head the hidden states at the K chosen places: ``[B, T, H] -> [1, K, H]``."""
        hidden_1KH = cast(Tensor, args[0]).flatten(0, 1).index_select(0, micro.select)[None]
        if request is not None and value_head is not None:
            request.values = run_value_head(value_head, hidden_1KH[0] if request.grad else hidden_1KH[0].detach())
        return (hidden_1KH, *args[1:])

    # The model itself runs its head, because models scale or cap their logits afterwards in ways of their own.
    wide = None if "forward" in vars(head) else widened_forward(head)  # score_tokens puts a function in its place
    with head.register_forward_pre_hook(choose), nullcontext() if wide is None else replace_forward(head, wide):
        if micro.packed is None:
            return model(input_ids=micro.input_ids, use_cache=False)
        with packed_attention(model, micro.packed) as bounds:
            return model(input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False, **bounds)


def output_layer(model: nn.Module) -> nn.Module:
    """Return the layer that gives logits. Raises ConfigError if there is none."""
    layer = plain_model(model).get_output_embeddings()
    if layer is None:
        raise ConfigError(f"{type(plain_model(model)).__name__} has no output layer: it is no causal language model")
    return layer
