"""The figures of the pages are those of the benchmark's last whole run."""

from __future__ import annotations

import pytest

from bench import figures


@pytest.mark.parametrize("page", figures.PAGES)
def test_a_page_has_the_figures_of_the_last_run(page: str) -> None:
    text = (figures.ROOT / page).read_text()
    assert figures.with_figures(page, text) == text, "python -m bench.figures writes it anew"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(254.7, "us", "255 µs"), (1.469, "ms", "1.5 ms"), (12876.0, "tokens/s", "12,900 tokens/s")],
)
def test_a_figure_has_two_or_three_digits_that_count(value: float, unit: str, text: str) -> None:
    assert figures.shown(value, unit) == text


def test_a_figure_that_was_not_taken_is_an_error() -> None:
    with pytest.raises(KeyError, match="noop_8_local"):
        figures.tables({}, ("SHORT",))
