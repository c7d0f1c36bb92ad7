"""Which generator draws which part next."""

from __future__ import annotations

from podium.trainer.generators import parts_of
from podium.trainer.rollout_queue import RolloutQueue


def drained(queue: RolloutQueue[str]) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    while (due := queue.next()) is not None:
        found.append(due)
    return found


def test_parts_go_to_the_generator_with_the_fewest_and_wait_when_all_are_full() -> None:
    queue = RolloutQueue[str](capacity=2)
    for generator in (0, 1):
        queue.admit(generator)
    for part in "abcde":
        queue.add(1, part)
    assert drained(queue) == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]
    assert len(queue) == 1
    queue.finished(1)
    assert drained(queue) == [(1, "e")]


def test_parts_of_earlier_steps_come_first_and_those_that_were_lost_before_them() -> None:
    queue = RolloutQueue[str](capacity=9)
    queue.add(2, "later")
    queue.add(1, "a")
    queue.add(1, "b")
    queue.add(1, "lost", first=True)
    assert drained(queue) == []
    queue.admit(7)
    assert [part for _, part in drained(queue)] == ["lost", "a", "b", "later"]


def test_a_generator_that_is_dismissed_gets_nothing_and_its_last_parts_count_for_nobody() -> None:
    queue = RolloutQueue[str](capacity=1)
    for generator in (0, 1):
        queue.admit(generator)
    queue.add(1, "a")
    assert drained(queue) == [(0, "a")]
    queue.dismiss(0)
    queue.finished(0)
    for part in "bc":
        queue.add(1, part)
    assert drained(queue) == [(1, "b")]
    assert queue.open == {1}
    queue.admit(0)
    assert drained(queue) == [(0, "c")]
    queue.add(1, "d")
    queue.clear()
    queue.finished(0)
    assert drained(queue) == []


def test_a_generator_has_five_times_what_it_draws_in_at_most_24_parts() -> None:
    for sequences, n in ((128, 8), (64, 16), (256, 1), (1, 16), (1024, 2)):
        size, most = parts_of(sequences, n)
        assert most <= 24, "a weight sync needs threads, too"
        assert size * most * n >= min(5 * sequences, 2 * n) or size > 1
        assert 2 * n <= size * most * n <= 5 * sequences + 2 * size * n
