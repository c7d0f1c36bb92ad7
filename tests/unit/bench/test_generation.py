"""The suite of generation draws what it says, by Podium as `podium serve` does and as a trainer does."""

from __future__ import annotations

import pytest

from bench.measure import alternate
from bench.suites import generation


@pytest.mark.parametrize(("batch", "prompts"), [(1, 1), (4, 1), (16, 2)])
def test_every_subject_draws_all_tokens_of_a_case(batch: int, prompts: int) -> None:
    case = generation.Case(name="tiny", shape="1m", batch=batch, new_tokens=3)
    texts = generation.random_prompts(case)
    assert len(texts) == prompts
    subjects = {
        "serve": generation.native_subject(case, texts, exact=False),
        "trainer": generation.native_subject(case, texts),
        "transformers": generation.transformers_subject(case, texts),
    }
    figures = alternate(subjects, repetitions=1)
    assert all(rates[0] > 0 for rates in figures.values())


def test_a_subject_that_draws_too_little_is_noticed() -> None:
    case = generation.Case(name="tiny", shape="1m", batch=4, new_tokens=3)
    with pytest.raises(AssertionError, match="11 tokens came back, 12"):
        generation.expect(case, 11)
