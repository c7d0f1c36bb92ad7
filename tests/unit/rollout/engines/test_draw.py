"""Drawing tokens: the numbers, the distribution, the kept sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from podium.rollout.engines.draw import draw, seed_at, uniforms
from podium.rollout.sampling import SamplingParams

_MASK = (1 << 64) - 1


def _splitmix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def _params(**changes: float) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 1, **changes})  # pyright: ignore[reportArgumentType]


def _logits(rows: int, vocabulary: int, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1)) * scale


def test_splitmix_is_the_published_generator() -> None:
    # First output of the reference implementation for seed 1234567.
    assert _splitmix((1234567 + 0x9E3779B97F4A7C15) & _MASK) == 6457827717110365317


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 987654321])
def test_uniforms_equal_python_integers(seed: int) -> None:
    golden = 0x9E3779B97F4A7C15
    state = _splitmix((seed * golden + 1) & _MASK)
    expected = [(_splitmix((state + (p + 1) * golden) & _MASK) >> 12) * 2.0**-52 for p in range(3, 8)]
    assert uniforms(torch.tensor([seed]), 3, 5)[0].tolist() == expected


def test_uniforms_of_neighbouring_seeds_and_positions_are_uniform_and_unrelated() -> None:
    numbers = uniforms(torch.arange(400), 0, 400)
    assert 0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1
    counts = torch.histc(numbers.flatten(), 100, 0, 1)
    assert ((counts - 1600) ** 2 / 1600).sum() < 160  # chi-square of 99 degrees: 160 is beyond 1 in 10,000
    for a, b in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 0.012


@pytest.mark.parametrize("vocabulary", [1, 50, 1024, 1025, 5000])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_draw_inverts_the_cumulative_distribution(vocabulary: int, temperature: float) -> None:
    logits, numbers = _logits(64, vocabulary), uniforms(torch.arange(64), 0, 1)[:, 0]
    result = draw(logits.clone(), _params(temperature=temperature), numbers)
    scaled = logits.double().numpy() / temperature
    probs = np.exp(scaled - scaled.max(1, keepdims=True))
    probs /= probs.sum(1, keepdims=True)
    expected = [
        int(np.searchsorted(np.cumsum(p), u, side="right")) for p, u in zip(probs, numbers.numpy(), strict=True)
    ]
    assert result.ids_B.tolist() == expected
    assert np.abs(result.logprobs_B.numpy() - np.log(probs[range(64), expected])).max() < 2e-6


@pytest.mark.parametrize("vocabulary", [7, 2000])
def test_draw_follows_the_distribution(vocabulary: int) -> None:
    rows = 40_000
    logits = _logits(1, vocabulary, 1.0)
    ids = draw(logits.repeat(rows, 1), _params(), uniforms(torch.arange(rows), 9, 1)[:, 0]).ids_B
    expected = torch.softmax(logits[0].double(), -1) * rows
    counts = torch.bincount(ids, minlength=vocabulary)
    deviation = ((counts - expected) ** 2 / expected).sum()
    freedom = vocabulary - 1
    assert deviation < freedom + 4 * (2 * freedom) ** 0.5 + 8


@pytest.mark.parametrize("vocabulary", [300, 3000])
def test_draw_never_takes_what_has_no_probability(vocabulary: int) -> None:
    logits = torch.full((2, vocabulary), float("-inf"))
    logits[:, [5, vocabulary // 2, vocabulary - 3]] = 1.0
    result = draw(logits, _params(), torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64))
    assert result.ids_B.tolist() == [5, vocabulary - 3]


def test_a_row_does_not_depend_on_the_others() -> None:
    logits, numbers = _logits(40, 3000), uniforms(torch.arange(40), 0, 1)[:, 0]
    for params in (_params(), _params(top_p=0.8), _params(top_k=20, temperature=0.7)):
        whole = draw(logits.clone(), params, numbers)
        part = draw(logits[7:9].clone(), params, numbers[7:9])
        assert torch.equal(whole.ids_B[7:9], part.ids_B)
        assert torch.equal(whole.logprobs_B[7:9], part.logprobs_B)


def test_temperature_zero_takes_the_most_probable_at_its_probability() -> None:
    logits = _logits(8, 50)
    result = draw(logits.clone(), _params(temperature=0.0, top_k=3), torch.zeros(8, dtype=torch.float64))
    assert torch.equal(result.ids_B, logits.argmax(-1))
    assert torch.allclose(result.logprobs_B, torch.log_softmax(logits, -1).amax(-1))
    assert result.kept_ids_BK is None


@pytest.mark.each_value
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (0, 0.05), (5, 1.0), (12, 0.6), (1, 1.0), (5000, 0.9999)])
@pytest.mark.parametrize("vocabulary", [60, 2000])
def test_kept_set_is_the_smallest_that_reaches_top_p_of_top_k(top_k: int, top_p: float, vocabulary: int) -> None:
    logits, numbers = _logits(32, vocabulary), uniforms(torch.arange(32), 0, 1)[:, 0]
    result = draw(logits.clone(), _params(top_k=top_k, top_p=top_p, temperature=0.8), numbers)
    assert result.kept_ids_BK is not None
    assert result.kept_sizes_B is not None
    probs = torch.softmax(logits.double() / 0.8, -1)
    for row, size in enumerate(result.kept_sizes_B.tolist()):
        mass = probs[row].sort(descending=True).values
        candidates = mass[: top_k or vocabulary] / mass[: top_k or vocabulary].sum()
        expected = next((k for k in range(1, len(candidates) + 1) if candidates[:k].sum() >= top_p), len(candidates))
        assert size == expected
        kept = result.kept_ids_BK[row, :size]
        assert len(set(kept.tolist())) == size
        assert torch.allclose(probs[row, kept], mass[:size])  # float32 cannot order what is nearly equal
        chosen = int(result.ids_B[row])
        assert chosen in kept.tolist()
        assert abs(float(result.logprobs_B[row]) - float(torch.log(probs[row, chosen] / probs[row, kept].sum()))) < 2e-6


def test_kept_draws_follow_the_renormalised_distribution() -> None:
    rows = 40_000
    logits = _logits(1, 40, 1.0)
    ids = draw(logits.repeat(rows, 1), _params(top_k=4), uniforms(torch.arange(rows), 0, 1)[:, 0]).ids_B
    mass, order = torch.softmax(logits[0], -1).topk(4)
    counts = torch.bincount(ids, minlength=40)[order]
    assert counts.sum() == rows
    expected = mass / mass.sum() * rows
    assert ((counts - expected) ** 2 / expected).sum() < 25


def test_the_seed_at_a_position_goes_on_where_the_first_seed_would() -> None:
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 0x1234567):
        for position in (0, 1, 7, 100_000):
            went_on = uniforms(torch.tensor([seed_at(seed, position)]), 0, 5)
            assert torch.equal(went_on, uniforms(torch.tensor([seed]), position, 5))
