"""Log-probabilities and entropies of a micro-batch's tokens under a causal language model.

Legend: K tokens with loss, V vocabulary, S kept ids over all K tokens.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from podium.data import Batch, fields
from podium.errors import ConfigError, DataError
from podium.workers.micro_batches import MicroBatch
from podium.workers.models import plain_model
from podium.workers.varlen import packed_attention

__all__ = ["KeptTokens", "TokenScores", "kept_tokens", "run_model", "score_tokens"]

_ENTROPY_CHUNK: Final = 1 << 24  # so many elements of the distributions are read together, without gradients


class KeptTokens(NamedTuple):
    """The ids that top-k or top-p left, for each of K tokens.

    Attributes:
        ids: int64 ``[S]``.
        token: int64 ``[S]``, the place among the K tokens of the token that each id belongs to.
    """

    ids: Tensor
    token: Tensor


class TokenScores(NamedTuple):
    """Log-probabilities and, where asked for, entropies of K tokens, float32 ``[K]``, in nats."""

    logprobs: Tensor
    entropy: Tensor | None


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
            f"{fields.KEPT_IDS} stand for {int(sizes_N.sum())}: only a token that was sampled has a set, so set no "
            f"{fields.LOSS_MASK} where none was, and change both columns together"
        )
    token_S = torch.repeat_interleave(torch.arange(len(sizes_K), device=sizes_N.device), sizes_K)
    within_S = torch.arange(len(token_S), device=sizes_N.device) - (sizes_K.cumsum(0) - sizes_K)[token_S]
    ids_S = ids[(ends_N[index_K] - sizes_K)[token_S] + within_S]
    device = micro.targets.device
    return KeptTokens(ids_S.to(device), token_S.to(device))


def score_tokens(
    model: nn.Module, batch: Batch, micro: MicroBatch, *, entropy: bool = False, entropy_grad: bool = False
) -> TokenScores:
    """Make one forward pass over a micro-batch of ``batch``. Logits exist for the K tokens only.

    The scores are those of the distribution that was sampled from: at ``batch.meta["temperature"]`` (1 if not given; 0,
    greedy sampling, counts as 1) and, where the batch has kept sets (``kept_sizes``), over those.

    Args:
        entropy: Whether the entropy is computed too, without gradients unless ``entropy_grad``.

    Raises:
        DataError: see :func:`kept_tokens`.
    """
    kept = kept_tokens(batch, micro)
    logits = run_model(model, micro).logits[0]
    temperature = float(batch.meta.get("temperature", 1.0))
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    if kept is not None:
        return _over_kept(logits.float(), micro.targets, kept, entropy=entropy, grad=entropy_grad)
    distribution = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    logprobs = distribution.gather(1, micro.targets[:, None])[:, 0]
    if not entropy:
        return TokenScores(logprobs, None)
    if entropy_grad:
        return TokenScores(logprobs, -(distribution.exp() * distribution).sum(-1))
    parts = distribution.detach().split(max(1, _ENTROPY_CHUNK // distribution.shape[1]))
    return TokenScores(logprobs, torch.cat([-(part.exp() * part).sum(-1) for part in parts]))


def run_model(model: nn.Module, micro: MicroBatch) -> Any:
    """Return the model's output for the micro-batch. Its logits are ``[1, K, V]``."""
    head = plain_model(model).get_output_embeddings()
    if head is None:
        raise ConfigError(f"{type(plain_model(model)).__name__} has no output layer: it is no causal language model")

    def choose(module: nn.Module, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """Give the head the hidden states at the K chosen places: ``[B, T, H] -> [1, K, H]``."""
        hidden = cast(Tensor, args[0])
        return (hidden.flatten(0, 1).index_select(0, micro.select)[None], *args[1:])

    # The model itself runs its head, because models scale or cap their logits afterwards in ways of their own.
    with head.register_forward_pre_hook(choose):
        if micro.packed is None:
            return model(input_ids=micro.input_ids, use_cache=False)
        with packed_attention(model, micro.packed) as bounds:
            return model(input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False, **bounds)


def _over_kept(logits: Tensor, targets: Tensor, kept: KeptTokens, *, entropy: bool, grad: bool) -> TokenScores:
    # By flat places, since the gradient of indexing by pairs is slow.
    chosen = logits.flatten().index_select(0, kept.token * logits.shape[1] + kept.ids)
    top = torch.full_like(logits[:, 0], -torch.inf).scatter_reduce(0, kept.token, chosen.detach(), "amax")
    mass = torch.zeros_like(top).index_add(0, kept.token, torch.exp(chosen - top[kept.token]))
    normalizer = top + mass.log()
    logprobs = logits.gather(1, targets[:, None])[:, 0] - normalizer
    if not entropy:
        return TokenScores(logprobs, None)
    with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
        log_p = chosen - normalizer[kept.token]
        total = torch.zeros_like(top).index_add(0, kept.token, -(log_p.exp() * log_p))
    return TokenScores(logprobs, total)
