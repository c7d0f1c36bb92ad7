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
    assert resumed.epoch == stopped.epoch == before // 10
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
