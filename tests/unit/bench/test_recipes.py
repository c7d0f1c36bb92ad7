"""The figures of the recipes of agents are those of the runs that were kept, and each run reached its bar."""

from __future__ import annotations

import json
import runpy
from typing import Any

import pytest

from bench import recipes
from bench.report import put_section
from podium.errors import ConfigError
from podium.models import char_tokenizer
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig


def test_the_page_has_the_figures_of_the_runs() -> None:
    text, curves = recipes.PAGE.read_text(), json.loads(recipes.RESULTS.read_text())
    assert put_section(text, recipes.make_table(curves), recipes.MARK) == text, (
        "python -m bench.recipes --report writes it anew"
    )


def test_each_run_of_sessions_reached_its_bar() -> None:
    assert not recipes.find_missed(json.loads(recipes.RESULTS.read_text()))


def test_a_run_below_its_bar_or_missing_is_named() -> None:
    curves = json.loads(recipes.RESULTS.read_text())
    curves["nim"]["1"][-1][1] = 0.59
    del curves["guess"]["2"]
    missed = "\n".join(recipes.find_missed(curves))
    assert "nim (1) goes from 2% to 59%, below 60%" in missed
    assert "guess (2) was not run: python -m bench.recipes --only 2" in missed


@pytest.mark.parametrize("recipe", ["search", "calculator"])
def test_the_template_of_the_recipes_leaves_tools_out_on_purpose(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up shows the model how they are used. Without the comment they are refused."""
    folder = recipes.ROOT / "examples" / "agents"
    monkeypatch.syspath_prepend(str(folder))
    names = runpy.run_path(str(folder / f"{recipe}.py"), run_name="recipe")
    template, tools = runpy.run_path(str(folder / "small.py"))["TEMPLATE"], find_schemas(names)
    messages = [{"role": "user", "content": "12="}]
    ChatEncoder(char_tokenizer("0123456789= ", chat_template=template), DataConfig()).check(messages, tools)
    plain = template.partition("-#}")[2]
    with pytest.raises(ConfigError, match="podium: tools are left out"):
        ChatEncoder(char_tokenizer("0123456789= ", chat_template=plain), DataConfig()).check(messages, tools)


def find_schemas(names: dict[str, Any]) -> list[Any]:
    """The schemas of a recipe's tools."""
    from podium_agents import Toolbox

    boxes = [value for value in names.values() if isinstance(value, Toolbox)]
    tools = boxes[0] if boxes else Toolbox([names["calculate"]])
    return [*tools.schemas]
