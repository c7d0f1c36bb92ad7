"""The figures of the pages are those of the benchmark's last whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import figures
from bench.report import END
from bench.suites import generation

TABLES = ("LOCAL", "RAY", "SHORT")


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


def rows_of_all_lines() -> dict[str, dict[str, Any]]:
    cells = [cell for name in TABLES for line in getattr(figures, name) for cell in line]
    rows: dict[str, dict[str, Any]] = {}
    for name, beside in figures.CELL.findall("".join(cells)):
        row = rows.setdefault(name, {"median": 2.0, "unit": "ms", "others": {}})
        if beside:
            row["others"][beside] = 3.0
    return rows


def test_a_line_whose_row_was_not_measured_is_left_out_and_named() -> None:
    rows = rows_of_all_lines()
    assert figures.absent_rows(rows, TABLES) == []
    text = figures.tables(rows, TABLES)
    assert "{" not in text and "not measured" not in text
    assert text.count("\n| no-op to 8 workers |") == 3
    del rows["noop_8_local"]
    assert figures.tables(rows, TABLES).count("\n| no-op to 8 workers |") == 1
    assert figures.absent_rows(rows, TABLES) == ["noop_8_local"]


def test_a_peer_that_was_not_installed_is_said_to_be_not_measured() -> None:
    rows = rows_of_all_lines()
    del rows["generate_135m_b16"]["others"]["vllm"]
    assert "transformers 3 ms, vLLM not measured |" in figures.tables(rows, ("LOCAL",))


def test_the_command_writes_what_there_is_and_fails_for_a_row_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    for page in figures.PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text(f"{figures.MARK}\n{END}\n")
    (tmp_path / "bench").mkdir()

    def write(names: set[str]) -> int:
        rows = [{"name": name, **row} for name, row in rows_of_all_lines().items() if name in names]
        (tmp_path / "bench" / "results.json").write_text(json.dumps(rows))
        return figures.main()

    names = {*rows_of_all_lines()}
    assert write(names - {"grpo_step_135m"}) == 1
    assert "no row grpo_step_135m:" in capsys.readouterr().err
    assert "| 2 ms | TRL" in (tmp_path / "README.md").read_text()
    assert write(names) == 0
    assert "135M" in (tmp_path / "README.md").read_text()


def test_lines_of_135m_name_rows_that_the_suites_give() -> None:
    cases = {case.name for case in (*generation.SMALL, *generation.REAL, *generation.REAL_BFLOAT16)}
    assert {name for name in rows_of_all_lines() if name.startswith("generate_")} <= cases
