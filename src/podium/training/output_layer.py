"""The output layer of a language model together with what is read off its logits, a few tokens at a time.

Logits ``[K, V]`` in float32 are the largest tensor of a forward pass: 18 GB for 32k tokens and 152k words. Nobody needs
more of them than log-probabilities and entropies ``[K]``. So they exist for a chunk of tokens only, and the backward
pass computes them again::

    hidden [C, H] ─▶ output layer ─▶ scale ─▶ soft cap ─▶ 1 / temperature ─▶ logits [C, V] ─▶ log-probability, entropy

Legend: K tokens with loss, C tokens of a chunk, H hidden size, V vocabulary, S kept ids over all K tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from podium.data.masks import unpack_masks
from podium.errors import ConfigError, DataError
from podium.models.loading import plain_model

_CHUNK: Final = 1 << 24  # elements of the logits that exist at the same time, 64 MiB in float32
_ACCELERATOR_CHUNK: Final = 1 << 27  # on accelerators, 512 MiB: a chunk adds to the whole gradient of the layer
_KEPT: Final = 1 << 25  # log-probabilities that are kept for the backward pass, 128 MiB; it makes more of them again
_NEVER: Final = -1e20  # the logit of an id that stands for no text: e to its power is 0, and 0 times it is 0
_FEWEST: Final = 256  # tokens of a chunk, as each chunk reads the layer's weight once


def logits_at_once(tokens: int, vocabulary: int) -> int:
    """The most logits of so many tokens that exist at the same time, in each of up to three tensors."""
    return min(tokens * vocabulary, max(_KEPT, _FEWEST * vocabulary))


class KeptTokens(NamedTuple):
    """The ids that top-k or top-p left, for each of K tokens.

    Attributes:
        ids: int64 ``[S]``.
        token: int64 ``[S]``, ascending: the place among the K tokens of the token that each id belongs to.
    """

    ids: Tensor
    token: Tensor


class MaskedTokens(NamedTuple):
    """The ids that each of K tokens was drawn from, as masks that tokens share.

    Attributes:
        masks: uint8 ``[M, W]``; bit ``i % 8`` of byte ``i // 8`` says whether id i was allowed.
        number: int64 ``[K]``: the mask of each token, from 1; 0 where every id was allowed.
    """

    masks: Tensor
    number: Tensor

    def outside(self, tokens: slice, vocabulary: int) -> Tensor:
        """Which ids were not allowed for these C tokens: bool ``[C, V]``."""
        number_C = self.number[tokens]
        used, place_C = (number_C - 1).clamp(min=0).unique(return_inverse=True)
        return unpack_masks(self.masks[used], vocabulary).logical_not_()[place_C].logical_and_((number_C > 0)[:, None])


class TextIds(NamedTuple):
    """The ids that distributions are over, because they stand for text.

    Attributes:
        limit: The ids from here on are left out.
        holes: So are these, below the limit.
    """

    limit: int | None = None
    holes: tuple[int, ...] = ()


_EVERY_ID: Final = TextIds()


class TokenScores(NamedTuple):
    """Log-probabilities of K tokens and, where asked for, entropies, the log-probabilities of the most probable tokens
    in their places, and the sums of squared probabilities: float32 ``[K]``, in nats.

    ``chosen`` are the log-probabilities ``[K, J]`` of the ids asked about, and ``top`` is float32 ``[K, 2 * J]``: the
    log-probabilities of the J most probable tokens from the largest down, then their ids, which float32 holds exactly.
    ``values`` are those of the model's value head, if it has one.
    """

    logprobs: Tensor
    entropy: Tensor | None
    best: Tensor | None = None
    squares: Tensor | None = None
    chosen: Tensor | None = None
    top: Tensor | None = None
    values: Tensor | None = None


class LogitsTail(NamedTuple):
    """The function that a model applies to the values of its output layer.

    Attributes:
        scale: The factor of the values.
        cap: The values x become ``cap * tanh(x / cap)``; None where they stay as they are.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """The logits of the output layer's ``values``."""
        scaled = values if self.scale == 1.0 else values * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap


@dataclass(frozen=True)
class _Asked:
    """What is asked of the logits."""

    targets_K: Tensor
    kept: KeptTokens | None
    tail: LogitsTail
    temperature: float
    entropy: bool
    entropy_grad: bool
    text_ids: TextIds
    best: bool = False
    masked: MaskedTokens | None = None
    squares: bool = False
    wide: bool = False
    chosen_KJ: Tensor | None = None
    top: int = 0

    def read_more(self, log_p: Tensor, kept: KeptTokens | None, count: int) -> Tensor:
        """What ``best``, ``squares`` or ``top`` ask for, ``[C]`` or ``[C, 2 * J]``; empty where none does."""
        if self.top:
            return torch.cat([part.to(log_p.dtype) for part in log_p.detach().topk(self.top, -1)], -1)
        if self.squares:
            return _sum_squares(log_p.detach(), kept, count)
        return log_p.detach().amax(-1) if self.best else log_p.new_empty(0)

    def read_chosen(self, log_p: Tensor, chunk: slice) -> Tensor:
        """The log-probabilities ``[C, J]`` of the ids asked about; J is 0 where none are."""
        if self.chosen_KJ is None:
            return log_p.new_empty(chunk.stop - chunk.start, 0)
        return log_p.gather(1, self.chosen_KJ[chunk])

    @cached_property
    def holes(self) -> Tensor | None:
        """The holes of ``text_ids`` as a tensor; None where there are none."""
        return torch.tensor(self.text_ids.holes, device=self.targets_K.device) if self.text_ids.holes else None

    def leave_out(self, logits_CV: Tensor, chunk: slice, kept: KeptTokens | None) -> None:
        """Overwrite the logits of ids that a chunk's tokens could not be. Kept ids are none of these."""
        if kept is not None:
            return
        if self.holes is not None:
            logits_CV.index_fill_(1, self.holes, _NEVER)
        if self.masked is not None:
            logits_CV.masked_fill_(self.masked.outside(chunk, logits_CV.shape[1]), _NEVER)

    def slope(self, logits_CV: Tensor | None) -> Tensor | float | None:
        """The derivative of the logits by the layer's values; None for 1. Without a cap it is the same for all."""
        factor = self.tail.scale / self.temperature
        if self.tail.cap is None or logits_CV is None:
            return None if factor == 1.0 else factor
        return (logits_CV * (self.temperature / self.tail.cap)).square_().neg_().add_(1.0).mul_(factor)

    def chunks(self, vocabulary: int) -> Iterator[tuple[slice, KeptTokens | None]]:
        """Each chunk's tokens, and its kept ids."""
        chunk_size = _CHUNK if self.targets_K.device.type == "cpu" else _ACCELERATOR_CHUNK
        size = max(_FEWEST, chunk_size // vocabulary)
        for start in range(0, max(len(self.targets_K), 1), size):  # no tokens are one empty chunk
            chunk = slice(start, min(start + size, len(self.targets_K)))
            if self.kept is None:
                yield chunk, None
                continue
            bounds = torch.tensor([chunk.start, chunk.stop], device=self.kept.token.device)
            first, last = torch.searchsorted(self.kept.token, bounds).tolist()
            yield chunk, KeptTokens(self.kept.ids[first:last], self.kept.token[first:last] - chunk.start)


_wide = WeakSet[nn.Module]()


def widen_output(model: nn.Module) -> None:
    """Let scores of ``model`` come from an output layer in float32, whatever the data type of other products is.

    Raises:
        ConfigError: The output layer is no plain linear layer, such as one with adapters.
    """
    layer = plain_model(model).get_output_embeddings()
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        raise ConfigError(
            f"parallel.precision.output = float32: the output layer is a {type(layer).__name__}, not a plain linear "
            "layer: leave the entry out, or leave the output layer out of model.lora.targets"
        )
    _wide.add(layer)


def widened_forward(layer: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The forward function in float32 of a layer of :func:`widen_output`; None for other layers."""

    def run(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            bias = cast("Tensor | None", layer.bias)
            return F.linear(
                hidden.float(), cast("Tensor", layer.weight).float(), None if bias is None else bias.float()
            )

    return run if layer in _wide else None


_tails = WeakKeyDictionary[nn.Module, LogitsTail | None]()


def logits_tail(model: nn.Module) -> LogitsTail | None:
    """Return what ``model``, a causal language model, does to the values of its output layer; None for anything else
    than a scale and a soft cap.

    Passes over two tokens with given values in the layer's place show it, the first time that a model is asked about.
    All ranks that share a sharded model ask together for the first time.
    """
    if model not in _tails:
        _tails[model] = _find_tail(model)
    return _tails[model]


def _find_tail(model: nn.Module) -> LogitsTail | None:
    inner: Any = plain_model(model)
    layer, device = inner.get_output_embeddings(), next(inner.parameters()).device
    modes = {module: module.training for module in model.modules()}
    probe_12V, passes = torch.empty(0), list[Tensor]()

    def answer(hidden_12H: Tensor) -> Tensor:
        nonlocal probe_12V
        probe_12V = _probe(former_forward(hidden_12H).shape[-1], device)
        return probe_12V.clone()

    try:
        for training in (False, True):  # dropout acts in training alone
            model.train(training)
            random = torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)
            with random, torch.enable_grad(), replace_forward(layer, answer) as former_forward:
                passes.append(inner(input_ids=torch.tensor([[0, 1]], device=device), use_cache=False).logits)
    except RuntimeError:  # the model needs more of its values than these give it, such as their dtype
        return None
    finally:
        for module, training in modes.items():
            module.training = training
    # What is trained after the layer changes, and needs gradients.
    if any(logits.shape != probe_12V.shape or logits.requires_grad for logits in passes):
        return None
    # A cap changes small values least; zero, the middle of an odd vocabulary, shows no scale.
    index = int(probe_12V[0, 0].abs().log().abs().argmin())
    value, logit = float(probe_12V[0, 0, index]), float(passes[0][0, 0, index])
    for cap in {None, getattr(inner.config.get_text_config(), "final_logit_softcapping", None)}:
        if cap is not None and abs(logit) >= cap:
            continue
        scale = logit / value if cap is None else math.atanh(logit / cap) * cap / value
        tail = LogitsTail(1.0 if math.isclose(scale, 1.0, rel_tol=1e-6) else scale, cap)
        if all(torch.allclose(tail(probe_12V), logits.float(), rtol=1e-5, atol=1e-5) for logits in passes):
            return tail
    return None


def _probe(vocabulary: int, device: torch.device) -> Tensor:
    """Values ``[1, 2, V]`` of two tokens that stand for those of an output layer.

    They cover all words, so that a change of a few words shows, and the two tokens differ in mean and spread, so that
    normalization shows. Some of the first token's are small, even in a small vocabulary, so that what follows a cap
    can be told. bfloat16 holds them exactly.
    """
    small = torch.linspace(-1.0, 1.0, vocabulary, device=device).pow(3).mul(80.0)
    large = torch.linspace(1000.0, -250.0, vocabulary, device=device)
    return torch.stack([small, large])[None].bfloat16().float()


@contextmanager
def replace_forward(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Let ``forward`` stand for a layer's own forward function during the block. Yields the layer's own one."""
    former_forward, was_set = layer.forward, "forward" in vars(layer)
    layer.forward = forward
    try:
        yield former_forward
    finally:
        if was_set:  # a library has replaced it before
            layer.forward = former_forward
        else:
            del layer.forward


def output_scores(
    hidden_KH: Tensor,
    layer: nn.Module,
    targets_K: Tensor,
    *,
    tail: LogitsTail,
    temperature: float = 1.0,
    kept: KeptTokens | None = None,
    masked: MaskedTokens | None = None,
    text_ids: TextIds = _EVERY_ID,
    entropy: bool = False,
    entropy_grad: bool = False,
    best: bool = False,
    squares: bool = False,
    chosen_KJ: Tensor | None = None,
    top: int = 0,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> TokenScores:
    """Return log-probabilities of ``targets_K``, and entropies, under the distributions that ``layer`` gives.

    Args:
        hidden_KH: What the layer reads for each token.
        layer: An ``nn.Linear``, or another module from ``[C, H]`` to ``[C, V]``, such as a layer with adapters.
        targets_K: int64 ``[K]``.
        tail: The function that the model applies to the layer's values.
        temperature: The logits are divided by it.
        kept: Distributions are those over these ids, if given.
        masked: Distributions are those over the ids of each token's mask, if given and no kept ids are.
        text_ids: Distributions are over no other ids. The layer gets no gradient of theirs.
        entropy: Whether entropies are computed, without gradients unless ``entropy_grad``.
        best: Whether the log-probabilities of the most probable tokens are read, without gradients.
        squares: Whether the sums of squared probabilities are computed, without gradients, in place of ``best``.
        chosen_KJ: The log-probabilities of these ids are computed too, with gradients: int64 ``[K, J]``.
        top: The log-probabilities of so many most probable tokens are read, without gradients, in place of ``best``.
        forward: The function that runs the layer, if not its own call.

    Raises:
        DataError: The numbers of targets and tokens differ; or there are kept ids beside ``chosen_KJ`` or ``top``.
    """
    if kept is not None and (top or chosen_KJ is not None):
        raise DataError("the tokens were drawn from kept ids (sampling.top_k, top_p or min_p): other ids have none")
    if len(hidden_KH) != len(targets_K):
        raise DataError(f"{len(hidden_KH)} hidden states stand for {len(targets_K)} tokens with loss")
    request = _Asked(
        targets_K,
        kept,
        tail,
        temperature,
        entropy,
        entropy and entropy_grad,
        text_ids,
        best,
        masked,
        squares,
        layer in _wide,
        chosen_KJ,
        top,
    )
    layer_forward = forward or layer.forward
    if isinstance(layer, nn.Linear) and getattr(layer_forward, "__func__", None) is nn.Linear.forward:
        scores = cast("_Scores", _LinearScores.apply(hidden_KH, layer.weight, layer.bias, request))
    else:
        scores = _score_by_checkpoints(hidden_KH, forward or layer, request)
    kind = "squares" if squares else "top" if top else "best"
    return TokenScores(
        scores[0],
        scores[1] if entropy else None,
        chosen=None if chosen_KJ is None else scores[3],
        **{kind: scores[2]} if squares or top or best else {},
    )


_Scores = tuple[Tensor, Tensor, Tensor, Tensor]


def _score_by_checkpoints(hidden_KH: Tensor, forward: Callable[[Tensor], Tensor], asked: _Asked) -> _Scores:
    """The same for any layer, by autograd. The backward pass runs the layer again."""

    def score(hidden_CH: Tensor, here: slice, kept: KeptTokens | None) -> _Scores:
        logits_CV = asked.tail(forward(hidden_CH)[:, : asked.text_ids.limit].float()) / asked.temperature
        asked.leave_out(logits_CV, here, kept)
        logprobs_C, log_p = _read(logits_CV, asked.targets_K[here], kept)
        more_C = asked.read_more(log_p, kept, len(logprobs_C))
        with torch.set_grad_enabled(asked.entropy_grad and torch.is_grad_enabled()):
            entropies_C = _entropies(log_p, kept, len(logprobs_C))
        return logprobs_C, entropies_C, more_C, asked.read_chosen(log_p, here)

    with torch.no_grad():
        vocabulary = forward(hidden_KH[:1]).shape[-1]
    parts = [
        cast("_Scores", checkpoint(score, hidden_KH[chunk], chunk, kept, use_reentrant=False))
        for chunk, kept in asked.chunks(vocabulary)
    ]
    return cast("_Scores", tuple(map(torch.cat, zip(*parts, strict=True))))


class _LinearScores(torch.autograd.Function):
    """Log-probabilities and entropies ``[K]`` of a linear layer. Gradients are summed over chunks in float32."""

    @staticmethod
    def forward(ctx: Any, hidden_KH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, asked: _Asked) -> _Scores:
        device = hidden_KH.device
        autocasts = torch.is_autocast_enabled(device.type)
        ctx.dtype = torch.get_autocast_dtype(device.type) if autocasts else weight_VH.dtype
        if asked.wide:
            ctx.dtype = torch.float32
        ctx.asked = asked
        logprobs_K = torch.empty(len(hidden_KH), device=device)
        entropy_K, asks_more = torch.zeros_like(logprobs_K), asked.best or asked.squares or asked.top > 0
        more_K = torch.zeros_like(logprobs_K if asks_more else logprobs_K[:0])
        if asked.top:
            more_K = more_K.new_zeros(len(hidden_KH), 2 * asked.top)
        chosen_KJ = logprobs_K.new_zeros(len(hidden_KH), 0 if asked.chosen_KJ is None else asked.chosen_KJ.shape[1])
        limit = asked.text_ids.limit
        hidden, weight = hidden_KH.to(ctx.dtype), weight_VH[:limit].to(ctx.dtype)
        size = len(hidden) * len(weight) if asked.kept is None else len(asked.kept.ids)
        keeps = any(ctx.needs_input_grad) and asked.tail.cap is None and size <= _KEPT
        log_ps: list[Tensor] = []
        for chunk, kept in asked.chunks(len(weight)):
            logits_CV = _logits(hidden[chunk], weight, bias_V, asked)
            asked.leave_out(logits_CV, chunk, kept)
            logprobs_K[chunk], log_p = _read(logits_CV, asked.targets_K[chunk], kept)
            chosen_KJ[chunk] = asked.read_chosen(log_p, chunk)
            if asked.entropy:
                entropy_K[chunk] = _entropies(log_p, kept, len(logits_CV))
            if asks_more:
                more_K[chunk] = asked.read_more(log_p, kept, len(logits_CV))
            if keeps:
                log_ps.append(log_p)
        ctx.save_for_backward(hidden_KH, weight_VH, bias_V, entropy_K, *log_ps)
        ctx.mark_non_differentiable(more_K, *(() if asked.entropy_grad else (entropy_K,)))
        return logprobs_K, entropy_K, more_K, chosen_KJ

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - as the decorator names no parameters
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        hidden_KH, weight_VH, bias_V, entropy_K, *log_ps = ctx.saved_tensors
        request: _Asked = ctx.asked
        for_hidden, for_weight, for_bias, _ = ctx.needs_input_grad
        limit = request.text_ids.limit
        weight, hidden = weight_VH[:limit].to(ctx.dtype), hidden_KH.to(ctx.dtype)
        grad_hidden = torch.empty_like(hidden_KH) if for_hidden else None
        grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if for_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if for_bias else None
        for number, (chunk, kept) in enumerate(request.chunks(len(weight))):
            if log_ps:
                log_p, slope = log_ps[number], request.slope(None)
            else:
                logits_CV = _logits(hidden[chunk], weight, bias_V, request)
                slope = request.slope(logits_CV)
                request.leave_out(logits_CV, chunk, kept)
                log_p = _read(logits_CV, request.targets_K[chunk], kept)[1]
                del logits_CV
            upstream = (gradients[0][chunk], gradients[1][chunk], entropy_K[chunk], gradients[3][chunk])
            grad_CV = _gradient(
                log_p,
                len(weight),
                request.targets_K[chunk],
                None if request.chosen_KJ is None else request.chosen_KJ[chunk],
                kept,
                *upstream,
                with_entropy=request.entropy_grad,
                keeps=bool(log_ps),
            )
            if slope is not None:
                grad_CV.mul_(slope)
            if grad_bias is not None:
                grad_bias[:limit] += grad_CV.sum(0)
            grad_CV = grad_CV.to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = grad_CV @ weight
            if grad_weight is not None and ctx.dtype == torch.float32:
                grad_weight[:limit].addmm_(grad_CV.T, hidden[chunk])
            elif grad_weight is not None:
                grad_weight[:limit] += grad_CV.T @ hidden[chunk]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_VH.dtype),
            None if grad_bias is None or bias_V is None else grad_bias.to(bias_V.dtype),
            None,
        )


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, asked: _Asked) -> Tensor:
    """The logits in float32, in a tensor of their own."""
    with torch.autocast(hidden_CH.device.type, enabled=False):
        bias = None if bias_V is None else bias_V[: len(weight_VH)].to(weight_VH.dtype)
        values = F.linear(hidden_CH, weight_VH, bias).float()
    tail, factor = asked.tail, asked.tail.scale / asked.temperature
    if tail.cap is not None:
        return values.mul_(tail.scale / tail.cap).tanh_().mul_(tail.cap / asked.temperature)
    return values if factor == 1.0 else values.mul_(factor)


def _read(logits_CV: Tensor, targets_C: Tensor, kept: KeptTokens | None) -> tuple[Tensor, Tensor]:
    """The targets' log-probabilities ``[C]``, and those of all ids ``[C, V]`` or of the kept ones ``[S]``."""
    if kept is None:
        log_p = torch.log_softmax(logits_CV, -1)
        return log_p.gather(1, targets_C[:, None])[:, 0], log_p
    # By flat places, since the gradient of indexing by pairs is slow.
    chosen = logits_CV.flatten().index_select(0, kept.token * logits_CV.shape[1] + kept.ids)
    top = torch.full_like(logits_CV[:, 0], -torch.inf).scatter_reduce(0, kept.token, chosen.detach(), "amax")
    mass = torch.zeros_like(top).index_add(0, kept.token, torch.exp(chosen - top[kept.token]))
    normalizer = top + mass.log()
    return logits_CV.gather(1, targets_C[:, None])[:, 0] - normalizer, chosen - normalizer[kept.token]


def _entropies(log_p: Tensor, kept: KeptTokens | None, count: int) -> Tensor:
    """The entropies ``[C]`` of distributions over all ids ``[C, V]`` or over kept ones ``[S]``."""
    if kept is None:
        return -torch.linalg.vecdot(log_p.exp(), log_p)
    return torch.zeros(count, device=log_p.device).index_add(0, kept.token, -(log_p.exp() * log_p))


def _sum_squares(log_p: Tensor, kept: KeptTokens | None, count: int) -> Tensor:
    """The sums of squared probabilities ``[C]`` of the distributions of :func:`_entropies`."""
    if kept is None:
        return log_p.exp().square_().sum(-1)
    return torch.zeros(count, device=log_p.device).index_add(0, kept.token, log_p.exp().square_())


def _gradient(
    log_p: Tensor,
    vocabulary: int,
    targets_C: Tensor,
    chosen_CJ: Tensor | None,
    kept: KeptTokens | None,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor,
    entropy_C: Tensor,
    grad_chosen_CJ: Tensor,
    *,
    with_entropy: bool,
    keeps: bool,
) -> Tensor:
    """The gradient of ``[C, V]`` logits, from log-probabilities as of :func:`_read`, which are lost unless ``keeps``.

    For the log-probability of target t: d/dz_j = [j = t] - p_j. For the entropy h: d/dz_j = -p_j (log p_j + h).
    """
    sum_C = grad_logprobs_C if chosen_CJ is None else grad_logprobs_C + grad_chosen_CJ.sum(-1)
    token = slice(None) if kept is None else kept.token
    column = (slice(None), None) if kept is None else slice(None)
    if with_entropy:
        weight = (log_p + entropy_C[token][column]).mul_(grad_entropy_C[token][column])
        gradient = log_p.exp().mul_(weight.add_(sum_C[token][column])).neg_()
    else:
        gradient = (log_p.exp() if keeps else log_p.exp_()).mul_(-sum_C[token][column])
    if kept is not None:
        places = kept.token * vocabulary + kept.ids
        flat = gradient.new_zeros(len(targets_C) * vocabulary)
        gradient = flat.index_add_(0, places, gradient).view(len(targets_C), vocabulary)
    if chosen_CJ is not None:
        gradient.scatter_add_(1, chosen_CJ, grad_chosen_CJ)
    return gradient.scatter_add_(1, targets_C[:, None], grad_logprobs_C[:, None])
