"""Epochs, their order, and going on where one stopped."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from podium.errors import CheckpointError, ConfigError
from podium.rollout.tasks import PromptStream


@pytest.mark.parametrize("count", [1, 7, 10, 23])
def test_every_item_comes_once_an_epoch_however_much_is_taken_at_once(count: int) -> None:
    stream = PromptStream(range(10), seed=3)
    taken: list[int] = []
    while len(taken) < 230:
        taken += stream.take(count)
    epochs = [taken[start : start + 10] for start in range(0, 230, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 23, "epochs must be shuffled anew"


def test_the_order_depends_on_the_seed_alone() -> None:
    first, second, other = (PromptStream(range(100), seed) for seed in (1, 1, 2))
    random.seed(5)
    a = first.take(250)
    random.seed(6)
    assert second.take(250) == a
    assert other.take(250) != a


def test_shuffles_are_fair() -> None:
    """Chi-squared of who comes first over many epochs: 9 degrees of freedom, 1 in 10,000 lies above 33.7."""
    stream = PromptStream(range(10), seed=0)
    firsts = Counter(stream.take(10)[0] for _ in range(2000))
    assert sum((firsts[item] - 200) ** 2 / 200 for item in range(10)) < 33.7


@pytest.mark.parametrize("before", [0, 1, 9, 10, 11, 20, 37])
def test_a_restored_stream_goes_on_as_if_nothing_had_happened(before: int) -> None:
    whole = PromptStream(range(10), seed=4)
    expected = whole.take(before + 50)[before:]
    stopped = PromptStream(range(10), seed=4)
    stopped.take(before)
    state = json.loads(json.dumps(stopped.state()))
    resumed = PromptStream(range(10), seed=99)
    resumed.take(3)
    resumed.restore(state)
    assert resumed.number == stopped.number == before
    assert resumed.take(50) == expected


def test_other_data_are_refused() -> None:
    state = PromptStream(range(10), seed=0).state()
    with pytest.raises(CheckpointError, match="of 10, and the data have 11"):
        PromptStream(range(11), seed=0).restore(state)
    with pytest.raises(CheckpointError, match="of other data, whose prompts have other tokens: go on with the data"):
        PromptStream(range(10), 0, "one").restore(PromptStream(range(10), 0, "another").state())
    PromptStream(range(10), 0, "one").restore(state)  # of a template that writes the date, or of an older version
    del state["digest"]
    PromptStream(range(10), 0, "one").restore(state)
    with pytest.raises(ConfigError, match="at least one"):
        PromptStream([], seed=0)


def mixture(seed: int = 0, **weights: float) -> PromptStream[str]:
    """A stream of 7 examples of the source a, 50 of b and 3 of c."""
    examples = [f"{source}{number}" for source, count in (("a", 7), ("b", 50), ("c", 3)) for number in range(count)]
    return PromptStream(examples, seed, sources=[example[0] for example in examples], weights=weights)


def test_weighted_sources_have_their_shares_and_epochs_of_their_own() -> None:
    taken = mixture(a=3, b=1, c=0.5).take(900)
    assert Counter(example[0] for example in taken) == {"a": 600, "b": 200, "c": 100}
    for step in range(0, 900, 9):
        counts = Counter(example[0] for example in taken[step : step + 9])
        assert counts == {"a": 6, "b": 2, "c": 1}, "each batch has the shares, too"
    for source, size in (("a", 7), ("b", 50), ("c", 3)):
        rows = [example for example in taken if example[0] == source]
        epochs = [rows[start : start + size] for start in range(0, len(rows) // size * size, size)]
        assert all(len({*epoch}) == size for epoch in epochs), "every example comes once an epoch of its source"
        assert len({tuple(epoch) for epoch in epochs}) > 1, "epochs must be shuffled anew"
    assert mixture(1, a=3, b=1, c=0.5).take(900) != taken


@pytest.mark.parametrize("before", [0, 1, 8, 59, 60, 61, 500])
def test_a_restored_mixture_goes_on_as_if_nothing_had_happened(before: int) -> None:
    expected = mixture(a=3, b=1, c=0.5).take(before + 100)[before:]
    stopped = mixture(a=3, b=1, c=0.5)
    stopped.take(before)
    resumed = mixture(99, a=3, b=1, c=0.5)
    resumed.take(3)
    resumed.restore(json.loads(json.dumps(stopped.state(), sort_keys=True)))
    assert resumed.number == before
    assert resumed.take(100) == expected


def test_a_mixture_that_is_restored_with_other_weights_has_them_from_there_on() -> None:
    stopped = mixture(a=3, b=1, c=0.5)
    stopped.take(900)
    resumed = mixture(a=1, b=1, c=2)
    resumed.restore(json.loads(json.dumps(stopped.state())))
    counts = [Counter(example[0] for example in resumed.take(8)) for _ in range(3)]
    assert counts == [{"a": 2, "b": 2, "c": 4}] * 3
    again = mixture(a=2, b=2, c=4)  # the same shares
    again.restore(json.loads(json.dumps(resumed.state())))
    assert again.take(100) == resumed.take(100), "a second resume knows since when these weights count"
    damaged = {**resumed.state(), "since_0": 10**6}
    with pytest.raises(CheckpointError, match="no valid shares of sources"):
        again.restore(damaged)


def test_a_checkpoint_that_does_not_know_its_weights_goes_on_as_before() -> None:
    stopped, expected = mixture(a=3, b=1, c=0.5), mixture(a=3, b=1, c=0.5).take(120)[20:]
    stopped.take(20)
    state = stopped.state()
    del state["shares"]
    resumed = mixture(a=3, b=1, c=0.5)
    resumed.restore(state)
    assert resumed.take(100) == expected


def test_a_mixture_goes_on_with_its_own_sources_only() -> None:
    stopped = mixture(a=3, b=1, c=0.5)
    stopped.take(8)
    for other in (mixture(a=3, b=1), PromptStream(range(60), 0)):
        with pytest.raises(CheckpointError, match=r"of other sources: go on with the data\.train"):
            other.restore(stopped.state())
    with pytest.raises(CheckpointError, match="of other sources"):
        mixture(a=3, b=1).restore(PromptStream(range(60), 0).state())
    with pytest.raises(ConfigError, match=r"d has a weight in data\.train, and no example of it"):
        mixture(a=3, d=1)
