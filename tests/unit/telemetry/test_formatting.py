"""Numbers and text for a person's eyes."""

from __future__ import annotations

import pytest

from podium.telemetry.formatting import compact, duration, percent, plain, visible


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0.3127, "0.313"), (-0.5, "-0.500"), (9.99, "9.990"), (9.996, "10.0"), (12.34, "12.3"),
        (99.96, "100"), (12345.0, "12.3k"), (0.0042, "4.2e-3"), (1e-12, "1.0e-12"), (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)  # fmt: skip
def test_plain(value: float, text: str) -> None:
    assert plain(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(950, "950"), (999.6, "1.00k"), (12345, "12.3k"), (999_600, "1.00M"), (4.2e6, "4.20M"), (3e9, "3.00G")],
)
def test_compact(value: float, text: str) -> None:
    assert compact(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.084, "84ms"), (0.9996, "1.00s"), (1.536, "1.54s"), (59.96, "1m00s"), (72, "1m12s"), (7500, "2h05m")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_percent() -> None:
    assert percent(0.4236) == "42.4%"
    assert percent(float("nan")) == "nan"


def test_what_a_model_wrote_cannot_command_the_terminal() -> None:
    shown = visible("a\x1b[2Jb\rc\u202ed\ud800\n\te")
    assert shown == "a\\x1b[2Jb\\x0dc\\u202ed\\ud800\n\te"
    shown.encode()


def test_ordinary_text_of_any_script_is_left_alone() -> None:
    text = "naïve 数学 می‌خواهم 👩‍🔬 x² ≤ 4"
    assert visible(text) == text


def test_a_long_text_keeps_both_ends_and_says_what_is_missing() -> None:
    shown = visible("a" * 500 + "b" * 500, limit=90)
    assert shown == "a" * 60 + " […910 characters…] " + "b" * 30
