"""The figures of the published model are those of the runs that were kept."""

from __future__ import annotations

import json

import pytest

from bench import real


@pytest.mark.parametrize("page", real.PAGES)
def test_a_page_has_the_figures_of_the_runs(page: str) -> None:
    runs = json.loads(real.RESULTS.read_text())
    text = (real.ROOT / page).read_text()
    assert real.with_figures(page, text, runs) == text, "python -m bench.real --report writes it anew"


def test_each_run_of_reinforcement_gained_a_quarter() -> None:
    runs = [run for run in json.loads(real.RESULTS.read_text()) if run["way"] != "sft"]
    assert runs
    for run in runs:
        assert run["curve"][-1][1] >= run["curve"][0][1] + 0.25, run


def test_a_session_shows_all_its_replies() -> None:
    single = {"completion": "12"}
    session = {"completion": "<tool_call>", "turn_said": ["<tool_call>", "12"]}
    assert [real._reply(row) for row in (single, session)] == ["12", "<tool_call>\n12"]
