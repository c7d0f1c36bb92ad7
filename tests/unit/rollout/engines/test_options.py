"""Engines by name: which class a name stands for, and the options that the class declares."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from podium.config import load_config
from podium.errors import ConfigError
from podium.functions import load_function
from podium.rollout.engines import EngineConfig, check_engine, find_engines, make_engine
from podium.rollout.engines.config import OWN_OPTIONS, NativeOptions, ReplayOptions
from podium.rollout.engines.engine_lookup import engine_class
from podium.rollout.engines.transformers import TransformersEngine
from podium.rollout.tasks import DataConfig
from podium.telemetry import Note, subscribe
from podium.trainer import GRPOConfig
from podium.trainer.checks.preflight import check_settings

from .conftest import MakeModel

MODULE = """
from podium.config import section
from podium.rollout.engines import ModelEngine
from podium.rollout.engines.transformers import TransformersEngine

@section("engine.options")
class Options:
    depth: int = 3
    \"\"\"How far it looks.\"\"\"

class Deep(TransformersEngine):
    options = Options

    def __init__(self, config, model):
        super().__init__(config, model)
        self.depth = config.read_options(Options).depth

class Unready(ModelEngine):
    pass

class Plain(TransformersEngine):
    options = dict

def function(config, model): ...
"""
BROKEN = "import podium\n\nfrom podium.errors import Nothing\n"
Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``install("Deep")`` registers that object of MODULE as the engine "mine"."""
    (tmp_path / "engine_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    own = dict(find_engines())

    def register(attribute: str) -> None:
        mine = EntryPoint("mine", f"engine_of_mine:{attribute}", "podium.engines")
        engines = {**own, "mine": mine}
        for module in ("config", "engine_lookup"):
            monkeypatch.setattr(f"podium.rollout.engines.{module}.find_engines", lambda: engines)

    return register


def test_an_engine_reads_the_options_that_its_class_declares(install: Install, make_model: MakeModel) -> None:
    install("Deep")
    engine: Any = make_engine(EngineConfig(name="mine", options={"depth": 7}), make_model("gpt2"))
    assert engine.depth == 7
    assert make_engine(EngineConfig(name="mine"), make_model("gpt2")).config.options == {}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mine", {"dept": 1}, "unknown key engine.options.dept (value 1); did you mean engine.options.depth?"),
        ("mine", {"depth": "far"}, "engine.options.depth = 'far': expected an integer"),
        ("mine", {"depth": "12"}, "engine.options.depth = '12': expected an integer"),
        (
            "native",
            {"cuda_graph": True},
            "unknown key engine.options.cuda_graph (value True); did you mean engine.options.cuda_graphs?",
        ),
        ("transformers", {"depth": 1}, "unknown key engine.options.depth (value 1): engine.options has float32_output"),
        ("auto", {"depth": 1}, "unknown key engine.options.depth (value 1): set engine.name to the engine that has it"),
    ],
)
def test_a_wrong_option_is_refused_with_the_engine_and_the_key(
    install: Install, make_model: MakeModel, name: str, options: dict[str, Any], message: str
) -> None:
    install("Deep")
    config = EngineConfig(name=name, options=options)
    for check in (lambda: check_engine(config), lambda: make_engine(config, make_model("gpt2"))):
        with pytest.raises(ConfigError) as refused:
            check()
        assert str(refused.value) == f"engine.name = {name!r}: {message}"


def test_text_is_no_number_in_options_also_from_the_command_line() -> None:
    config = load_config(
        GRPOConfig, None, ["--data.train=chain_sum", "--engine.name=native", "--engine.options.prefill_tokens", "64"]
    )
    assert config.engine.options == {"prefill_tokens": 64}
    assert config.engine.read_options(NativeOptions).prefill_tokens == 64
    with pytest.raises(ConfigError, match=r"engine.options.prefill_tokens = '64': expected an integer from 1 to 1e9"):
        EngineConfig(name="native", options={"prefill_tokens": "64"}).read_options(NativeOptions)


@pytest.mark.parametrize("name", ["my_engine:Engine", "mine"])
def test_an_unknown_name_says_how_an_engine_of_ones_own_is_chosen(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"not by module:Class: see docs/engines.md; .*group podium\.engines, .*podium-NAME"
    ):
        EngineConfig(name=name)


def test_a_class_that_is_used_without_a_name_is_named_by_its_options() -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(options={"cuda_graph": True}).read_options(NativeOptions)
    assert str(refused.value).startswith(
        "podium.rollout.engines.config.NativeOptions: unknown key engine.options.cuda_graph"
    )


def test_a_broken_import_is_named_with_its_file_and_line(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("Deep")
    monkeypatch.delitem(sys.modules, "engine_of_mine", raising=False)
    (tmp_path / "engine_of_mine.py").write_text(BROKEN)
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*engine_of_mine\.py:3: cannot import name 'Nothing'"):
        check_engine(EngineConfig(name="mine"))


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("function", "engine_of_mine:function is no engine: expected a subclass of podium.rollout.engines.Engine"),
        ("Options", "engine_of_mine:Options is no engine"),
        ("Missing", "engine_of_mine:Missing cannot be loaded: module 'engine_of_mine' has no attribute 'Missing'"),
        ("Unready", "engine_of_mine:Unready does not implement advance, supports, which every engine does"),
        ("Plain", 'which is no section: decorate the class with @section("engine.options")'),
    ],
)
def test_what_is_no_engine_is_refused_before_anything_starts(install: Install, attribute: str, message: str) -> None:
    install(attribute)
    config = GRPOConfig(engine=EngineConfig(name="mine"))
    with pytest.raises(ConfigError) as refused:
        check_settings(GRPOConfig(**{**vars(config), "data": type(config.data)(train="reasoning_gym:chain_sum")}))
    assert str(refused.value).startswith("engine.name = 'mine': engine_of_mine:")
    assert message in str(refused.value)


def test_the_options_of_the_page_on_engines_are_read(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "engines.md").read_text()
    _, _, example, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "plain_of_the_page.py").write_text(example)
    engine = load_function(f"{tmp_path}/plain_of_the_page.py:PlainEngine", key="engine.name")
    options: Any = EngineConfig(options={"max_batch": 4}).read_options(vars(engine)["options"])
    assert options.max_batch == 4


def test_podiums_own_engines_are_checked_without_importing_torch() -> None:
    own: dict[str, Any] = {"native": engine_class("native"), "transformers": engine_class("transformers")}
    declared = {name: cls.options for name, cls in own.items()} | {"replay": ReplayOptions}
    assert declared == {name: options for name, options in OWN_OPTIONS.items() if name != "auto"}
    script = (
        "import sys; from podium.rollout.engines import EngineConfig, check_engine;"
        "[check_engine(EngineConfig(name=name)) for name in ('auto', 'native', 'transformers')];"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_run_says_that_the_engine_that_auto_would_choose_is_not_installed(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = {name: entry for name, entry in find_engines().items() if name != "native"}
    config = GRPOConfig(data=DataConfig(train="reasoning_gym:chain_sum"))
    notes: list[str] = []
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    try:
        check_settings(config)
        assert not any("engine.name" in note for note in notes)
        for module in ("rollout.engines.config", "rollout.engines.engine_lookup", "trainer.checks.preflight"):
            monkeypatch.setattr(f"podium.{module}.find_engines", lambda: rest)
        check_settings(config)
    finally:
        unsubscribe()
    assert any("native is faster" in note and "group podium.engines" in note for note in notes)
    assert isinstance(make_engine(config.engine, make_model("qwen3")), TransformersEngine)
    with pytest.raises(
        ConfigError, match=r"engine.name = 'native': expected auto or an installed engine: .*podium-NAME"
    ):
        EngineConfig(name="native")
