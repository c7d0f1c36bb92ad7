"""Which prompts a curriculum passes over, what it knows when, and what a checkpoint keeps."""

from __future__ import annotations

import json

import pytest

from podium.runs.sections import PromptChoice
from podium.telemetry import Event, Note, flush, subscribe
from podium.trainer.curriculum import PassRates
from podium.trainer.prompts import draw_uniform

SOLVED, PASSED = "solved (batch.prompts.skip_solved)", "passed over (batch.prompts.curriculum)"


def rates(lag: int = 0, examples: int = 1000, **entries: object) -> PassRates:
    return PassRates(PromptChoice(filter="none", **entries), 7, lag, examples)  # pyright: ignore[reportArgumentType]


def test_a_solved_prompt_is_passed_over_until_it_fails_again() -> None:
    known = rates(skip_solved=0.75)
    assert known.find_reason(1, 0, 5) is None, "nothing is known yet"
    known.add(1, {5: 1.0, 6: 0.5})
    assert [known.find_reason(2, number, example) for number, example in enumerate((5, 6, 7))] == [SOLVED, None, None]
    known.add(2, {5: 0.0})
    assert known.find_reason(3, 9, 5) is None, "the mean of 1 and 0"


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_step_knows_no_more_than_its_schedule_promises(lag: int) -> None:
    known = rates(lag, skip_solved=1.0)
    known.add(4, {0: 1.0})
    assert [known.find_reason(4 + later, 0, 0) for later in range(lag + 2)] == [None] * (lag + 1) + [SOLVED]


@pytest.mark.parametrize(("curriculum", "rate", "share"), [("failures", 0.25, 0.75), ("variance", 0.25, 0.75)])
@pytest.mark.parametrize(("extreme", "least"), [(1.0, 0.05)])
def test_prompts_are_taken_with_the_probability_of_the_formula(
    curriculum: str, rate: float, share: float, extreme: float, least: float
) -> None:
    known = rates(curriculum=curriculum)
    known.add(1, {0: rate, 1: extreme, 2: 0.0})
    taken = [[known.find_reason(2, number, example) is None for number in range(4000)] for example in range(3)]
    means = [sum(each) / 4000 for each in taken]
    assert means[0] == pytest.approx(share, abs=0.03)
    assert means[1] == pytest.approx(least, abs=0.02)
    assert means[2] == pytest.approx(1.0 if curriculum == "failures" else least, abs=0.02)
    assert draw_uniform(7, 1) != draw_uniform(7, 2) != draw_uniform(8, 2)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_resumed_step_knows_no_more_than_it_knew_although_later_ones_have_begun(ahead: int) -> None:
    """With the schedule asynchronous, a checkpoint had what the steps that run ahead knew."""
    whole, ran_ahead, resumed = (rates(2, skip_solved=0.6) for _ in range(3))
    for step, share in enumerate((1.0, 0.0, 1.0, 1.0), 1):
        for known in (whole, ran_ahead):
            known.add(step, {0: share, step: share})
    for step in range(5, 5 + ahead):
        ran_ahead.find_reason(step, 0, 0)
    resumed.restore(json.loads(json.dumps(ran_ahead.state(4))))
    for step in range(5, 9):
        reasons = [[known.find_reason(step, 0, example) for example in range(5)] for known in (resumed, whole)]
        assert reasons[0] == reasons[1], step


def test_what_a_checkpoint_keeps_is_what_was_known() -> None:
    known = rates(2, skip_solved=1.0)
    for step in range(1, 6):
        known.add(step, {step: 1.0})
    assert known.find_reason(5, 0, 1) == SOLVED
    again = rates(2, skip_solved=1.0)
    again.restore(json.loads(json.dumps(known.state(4))))
    again.add(5, {5: 1.0})  # collected again after the checkpoint
    for step in range(5, 9):
        for example in range(1, 6):
            assert again.find_reason(step, 0, example) == known.find_reason(step, 0, example)


def test_a_run_whose_prompts_are_all_solved_goes_on_and_says_so() -> None:
    heard = list[Event]()
    unsubscribe = subscribe(heard.append)
    known = rates(examples=3, skip_solved=1.0)
    known.add(1, dict.fromkeys(range(3), 1.0))
    reasons = [known.find_reason(2, number, number % 3) for number in range(8)]
    flush()
    unsubscribe()
    assert reasons == [SOLVED, SOLVED, SOLVED, None, SOLVED, SOLVED, SOLVED, None]
    notes = [event.text for event in heard if isinstance(event, Note)]
    assert len(notes) == 1 and "all 3 prompts" in notes[0]
