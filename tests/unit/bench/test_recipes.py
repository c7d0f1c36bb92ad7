"""The figures of the recipes of agents are those of the runs that were kept, and each run reached its bar."""

from __future__ import annotations

import json

from bench import recipes
from bench.report import put_section


def test_the_page_has_the_figures_of_the_runs() -> None:
    text, curves = recipes.PAGE.read_text(), json.loads(recipes.RESULTS.read_text())
    assert put_section(text, recipes.make_table(curves), recipes.MARK) == text, (
        "python -m bench.recipes --report writes it anew"
    )


def test_each_run_of_sessions_reached_its_bar() -> None:
    missed = recipes.find_missed(json.loads(recipes.RESULTS.read_text()))
    assert not [sentence for sentence in missed if "was not run" not in sentence]


def test_a_run_below_its_bar_or_missing_is_named() -> None:
    curves = json.loads(recipes.RESULTS.read_text())
    curves["nim"]["1"][-1][1] = 0.59
    del curves["guess"]["2"]
    missed = "\n".join(recipes.find_missed(curves))
    assert "nim (1) goes from 2% to 59%, below 60%" in missed
    assert "guess (2) was not run: python -m bench.recipes --only 2" in missed
