"""What an unknown key says where no package with answers to settings of other projects is installed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.metadata import EntryPoint

import pytest

from podium import answers
from podium.algorithms import AlgorithmConfig
from podium.config import build_config, parse_overrides
from podium.errors import ConfigError
from podium.rollout.engines import EngineConfig
from podium.trainer import GRPOConfig


@pytest.fixture(autouse=True)
def _no_answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(answers, "list_entry_points", lambda group: ())
    answers.load_answers.cache_clear()
    yield
    answers.load_answers.cache_clear()


def test_an_unknown_key_says_how_answers_are_installed() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(GRPOConfig, {"learning_rate": 1e-6})
    message = str(caught.value)
    assert message.startswith("unknown key learning_rate (value 1e-06): keys whose help has this word are optim.lr, ")
    assert "; the configuration has run, model, " in message
    assert "through the entry point group podium.answers" in message
    assert "plugins/podium-migration" in message.rpartition("the missing one by: pip install ")[2]


def test_an_option_of_a_component_is_nobody_elses() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(name="transformers", options={"beta": 1}).read_options(AlgorithmConfig)
    assert "podium.answers" not in str(caught.value)


def test_typing_errors_values_and_words_are_answered_as_ever() -> None:
    with pytest.raises(ConfigError, match=r"^unknown key optim\.ls \(value 1\); did you mean optim\.lr\?$"):
        build_config(GRPOConfig, {"optim": {"ls": 1}})
    with pytest.raises(ConfigError, match=r"algorithm\.loss = 'ppo_clap': .*; did you mean ppo_clip\?"):
        AlgorithmConfig(loss="ppo_clap")
    words = {
        "optim.lr=1": "write --optim.lr 1",
        "~optim.lr": "leave it out",
        "optim.ls=1": "write --optim.lr 1",
        "trainer.test_freq=-1": "write --section.key value, as in --optim.lr 1e-4",
    }
    for word, answer in words.items():
        with pytest.raises(ConfigError) as caught:
            parse_overrides(GRPOConfig, [word])
        assert str(caught.value) == f"{word!r} is no setting: {answer}"


class OneKey(answers.Answers):
    def describe_setting(self, path: str, value: object, keys: Collection[str] | None) -> str:
        return ": write optim.lr" if path == "learning_rate" else ""


class OneValue(answers.Answers):
    def find_translation(self, key: str, value: object) -> answers.Translation | None:
        return answers.Translation("ppo_clip") if value == "clipped" else None

    def describe_word(self, argument: str, keys: Collection[str]) -> str:
        return "write optim.lr" if argument == "lr=1" else ""


def test_a_package_that_cannot_be_imported_is_named_and_all_others_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"a": "podium_absent.answers:Absent", "b": f"{__name__}:OneKey", "c": f"{__name__}:OneValue"}
    points = [EntryPoint(name, value, "podium.answers") for name, value in values.items()]
    monkeypatch.setattr(answers, "list_entry_points", lambda group: points)
    with pytest.raises(ConfigError, match=r"^unknown key learning_rate \(value 1\): write optim\.lr$"):
        build_config(GRPOConfig, {"learning_rate": 1})
    with pytest.raises(ConfigError, match="did you mean ppo_clip"):
        AlgorithmConfig(loss="clipped")
    with pytest.raises(ConfigError, match=r"'lr=1' is no setting: write optim\.lr$"):
        parse_overrides(GRPOConfig, ["lr=1"])
    with pytest.raises(ConfigError, match=r"unknown key zzz .*: podium_absent\.answers:Absent \(ModuleNotFoundError"):
        build_config(GRPOConfig, {"zzz": 1})
