"""The table of families in docs/models.md says what the command that writes it finds."""

from __future__ import annotations

import pytest

from bench import families


def test_the_page_has_every_family_and_no_figure_that_is_wrong() -> None:
    lines = _lines()
    assert list(lines) == list(families.FAMILIES)
    for model_type, line in lines.items():
        assert line.startswith(f"| {families.FAMILIES[model_type][0]} |")
        assert set(families.statements(line)) <= {"True", "True (rows of one length)", "no"}, line


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_the_page_says_what_the_command_finds() -> None:
    chosen = ["qwen3_moe", "gpt_oss", "minimax"]
    found = dict(zip(chosen, families.rows(chosen), strict=True))
    assert {name: families.statements(line) for name, line in found.items()} == {
        name: families.statements(_lines()[name]) for name in chosen
    }


def test_a_figure_that_is_wrong_is_no_statement_of_the_page() -> None:
    assert families.statements(
        "| A | `a` | 2e-7 | no | 3e-5 (rows of one length) | **7e-1** | 0e+00 | **2e+00** |"
    ) == [*("True", "no", "True (rows of one length)", "**False**", "True", "**False**")]


def _lines() -> dict[str, str]:
    lines = [line for line in families.PAGE.read_text().splitlines() if line.startswith("| ")]
    return {line.split("`")[1]: line for line in lines if "| `" in line and "model_type" not in line}
