"""Drawing tokens: one uniform number for each token, sought in the cumulative distribution.

The number depends on (seed, position) alone, and the arithmetic of a row on that row alone. So what is drawn does not
depend on the other completions of the batch.

Legend: B rows (completions), V vocabulary, N entries of a row, K candidates kept by top-k, J most probable tokens that
are recorded.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from podium.rollout.sampling import SamplingParams

_CONSTANTS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GOLDEN, _MIX_1, _MIX_2 = map(np.uint64, _CONSTANTS)
_ONE, _CUT = np.uint64(1), np.uint64(12)
_WORD = 2**64
_FLAT_LIMIT = 1024  # above it, summing chunks first costs less than one cumulative sum over the whole vocabulary
_CHUNK = 256
_CANDIDATES = 1024


class Draw(NamedTuple):
    """Tokens drawn for B rows. With top-k or top-p, row b kept ``kept_ids_BK[b, :kept_sizes_B[b]]``. ``top_B2J`` are
    those of ``RequestParams.record_top``, as in :class:`.Completion`."""

    ids_B: Tensor
    logprobs_B: Tensor
    kept_ids_BK: Tensor | None = None
    kept_sizes_B: Tensor | None = None
    top_B2J: Tensor | None = None


def uniforms(seeds_B: Tensor, start: int, count: int) -> Tensor:
    """Numbers in [0, 1) for positions ``start`` to ``start + count - 1`` of each seed: float64 ``[B, count]``.

    The seeds are int64, and the result is on their device. Position 0 is that of a completion's first token.

    Position p of seed s is output p + 1, cut to 52 bits, of the SplitMix64 generator whose state is the mixed seed
    (Steele, Lea and Flood, 2014, "Fast Splittable Pseudorandom Number Generators", figure 14).
    """
    seeds = seeds_B.cpu().numpy().astype(np.uint64)  # NumPy's shifts of unsigned integers bring in zeros
    positions = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    states = _mix(seeds * _GOLDEN + _ONE)
    bits = _mix(states[:, None] + positions * _GOLDEN)
    return torch.from_numpy((bits >> _CUT) * 2.0**-52).to(seeds_B.device)


def seed_at(seed: int, position: int) -> int:
    """The seed whose number for each position p is that of ``seed`` for ``position + p``, as a signed integer.

    A completion of which ``position`` tokens were drawn goes on with it, as if it had never been interrupted.
    """
    golden, first, second = _CONSTANTS
    state = int(_mix(np.array([seed % _WORD], np.uint64) * _GOLDEN + _ONE)[0]) + position * golden
    for factor, shift in ((1, 31), (second, 27), (first, 30)):  # each line of _mix, the last one first
        state = state * pow(factor, -1, _WORD) % _WORD
        combined = state
        while state := state >> shift:
            combined ^= state
        state = combined
    start = (state - 1) * pow(golden, -1, _WORD) % _WORD
    return start - _WORD if start >= _WORD // 2 else start


def leave_out(logits_BV: Tensor, text_ids: tuple[int, tuple[int, ...]] | None) -> Tensor:
    """Return the logits of ids below the limit of :attr:`.Engine.text_ids`; those of holes, ids that stand for no text,
    become -inf in place."""
    if text_ids is None:
        return logits_BV
    limit, holes = text_ids
    logits_BV = logits_BV[:, :limit]
    return logits_BV.index_fill_(1, torch.tensor(holes, device=logits_BV.device), -torch.inf) if holes else logits_BV


def draw(logits_BV: Tensor, params: SamplingParams, uniforms_B: Tensor) -> Draw:
    """Draw one token a row from ``logits_BV``, float32, whose contents are overwritten.

    ``uniforms_B`` is float64 in [0, 1), on the same device, where the result is as well. Log-probabilities are those of
    the distribution drawn from; at temperature 0 those of the most probable token at temperature 1.
    """
    if params.temperature == 0:
        ids, log_p_BV = logits_BV.argmax(-1), torch.log_softmax(logits_BV, -1)
        top = _find_top(log_p_BV, params.record_top) if params.record_top else None
        return Draw(ids, log_p_BV.gather(1, ids.unsqueeze(1)).squeeze(1), top_B2J=top)
    if params.temperature != 1:
        logits_BV.div_(params.temperature)
    probs = torch.softmax(logits_BV, -1)
    if params.filtered:
        return _draw_kept(probs, params, uniforms_B)
    index = _invert(probs, uniforms_B)
    top = _find_top(probs.log(), params.record_top) if params.record_top else None
    return Draw(index.squeeze(1), probs.gather(1, index).log_().squeeze(1), top_B2J=top)


def _find_top(log_p_BV: Tensor, count: int) -> Tensor:
    """The largest ``count`` log-probabilities, then their ids: ``[B, 2 * count]``."""
    log_p_BJ, ids_BJ = log_p_BV.topk(min(count, log_p_BV.shape[1]), -1)
    missing = (0, count - log_p_BJ.shape[1])
    return torch.cat([F.pad(log_p_BJ, missing, value=-torch.inf), F.pad(ids_BJ.float(), missing)], -1)


def _invert(mass_BN: Tensor, uniforms_B: Tensor) -> Tensor:
    """The first entry of each row at which the running sum exceeds the row's sum times its number of ``uniforms_B``:
    int64 ``[B, 1]``."""
    uniform = uniforms_B.unsqueeze(1)
    size = mass_BN.shape[1]
    if size <= _FLAT_LIMIT:
        return _search(mass_BN, uniform)[0]
    even_size = size - size % _CHUNK
    sums = mass_BN[:, :even_size].unflatten(1, (-1, _CHUNK)).sum(-1)
    if even_size < size:
        sums = torch.cat((sums, mass_BN[:, even_size:].sum(-1, keepdim=True)), 1)
    chunk, running, target = _search(sums, uniform)
    start = chunk * _CHUNK
    columns = start + torch.arange(_CHUNK, device=mass_BN.device)
    outside = columns >= size
    inside = mass_BN.gather(1, columns.clamp_(max=size - 1)).masked_fill_(outside, 0)
    entry = sums.gather(1, chunk).to(torch.float64)
    share = ((target - running.gather(1, chunk) + entry) / entry).clamp_(0, 1 - 2.0**-52)
    return start + _search(inside, share)[0]


def _search(mass_BN: Tensor, uniform_B1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Index ``[B, 1]`` of the entry, the running sums ``[B, N]`` and the sum sought ``[B, 1]``.

    The sums are float64. In float32 their rounding would move the boundaries between tokens so much that two engines
    whose logits agree to 1e-7 drew differently once in some ten thousand tokens.
    """
    running = torch.cumsum(mass_BN, -1, dtype=torch.float64)
    target = uniform_B1 * running[:, -1:]
    index = torch.searchsorted(running, target, right=True)
    # Past the end only for sums that are not numbers; the caller finds the log-probability not finite and says so.
    return index.clamp_(max=mass_BN.shape[1] - 1), running, target


def _draw_kept(probs_BV: Tensor, params: SamplingParams, uniforms_B: Tensor) -> Draw:
    mass, order, total = _candidates(probs_BV, params)
    if params.min_p > 0:
        mass = mass.masked_fill(mass < params.min_p * mass[:, :1], 0)
        total = mass.sum(-1, keepdim=True, dtype=torch.float64)
    running = torch.cumsum(mass, -1, dtype=torch.float64)
    before = torch.cat((torch.zeros_like(running[:, :1]), running[:, :-1]), 1)
    dropped = (before >= params.top_p * total) | (mass == 0)
    dropped[:, 0] = False
    mass = mass.masked_fill(dropped, 0)
    index = _invert(mass, uniforms_B)
    share = mass.gather(1, index).to(torch.float64) / mass.sum(-1, keepdim=True, dtype=torch.float64)
    sizes = mass.shape[1] - dropped.sum(-1)
    return Draw(order.gather(1, index).squeeze(1), share.log_().squeeze(1).float(), order, sizes)


def _candidates(probs_BV: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities ``[B, K]`` from the largest down, their ids, and the mass of which top-p takes its share, [B, 1].

    Sorting a large vocabulary takes longer than a decode step. So top-p looks at the largest thousand first, and at
    more only when those of some row do not reach it. A row's kept set is the same in both cases. Likewise min-p looks
    at more only when the least of these still reaches it.
    """
    vocabulary = probs_BV.shape[1]
    if params.top_k > 0:
        mass, order = probs_BV.topk(min(params.top_k, vocabulary), dim=-1)
        return mass, order, mass.sum(-1, keepdim=True, dtype=torch.float64)
    total = probs_BV.sum(-1, keepdim=True, dtype=torch.float64)
    size = min(_CANDIDATES, vocabulary)
    while True:
        mass, order = probs_BV.topk(size, dim=-1)
        short = mass.sum(-1, keepdim=True, dtype=torch.float64) < params.top_p * total
        if params.min_p > 0:
            short = mass[:, -1:] >= params.min_p * mass[:, :1]
        if size == vocabulary or not bool(short.any()):
            return mass, order, total
        size = min(size * 8, vocabulary)


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
