"""Configuration: what is read, and what a mistake looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from podium.errors import ConfigError
from podium.trainer.loading import build_config, config_to_yaml, keys_of, load_config, parse_overrides


@dataclass(frozen=True, kw_only=True)
class Optim:
    lr: float = 1e-3  # step size
    betas: tuple[float, ...] = (0.9, 0.99)  # of AdamW
    schedule: Literal["constant", "cosine"] = "constant"  # of the step size
    # clip the gradient's norm here;
    # None: never
    max_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError(f"optim.lr = {self.lr}: expected a positive number")


@dataclass(frozen=True, kw_only=True)
class Model:
    path: str = ""  # directory or hub name
    shape: Mapping[str, Any] = field(default_factory=dict)  # of a model from scratch
    lora_rank: int = 0  # 0: no adapters
    compile: bool = False  # torch.compile


@dataclass(frozen=True, kw_only=True)
class Extra:
    rank: int = 8  # of the update


@dataclass(frozen=True, kw_only=True)
class Root:
    steps: int = 10  # optimizer steps
    model: Model = Model()
    optim: Optim = Optim()
    extra: Extra | None = None


def test_yaml_and_overrides_in_that_order(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 3\noptim: {lr: 1e-4, betas: [0.8, 0.9]}\nmodel: {path: a, shape: {layers: 2}}\n")
    config = load_config(Root, path, ["--optim.lr=2e-5", "--model.shape.hidden", "64", "--model.path", "007"])
    assert config == Root(
        steps=3,
        optim=Optim(lr=2e-5, betas=(0.8, 0.9)),
        model=Model(path="007", shape={"layers": 2, "hidden": 64}),
    )


def test_overrides_are_typed_by_their_key() -> None:
    pairs = parse_overrides(Root, ["--model.path", "null", "--optim.max_norm=null", "--model.lora-rank", "4"])
    assert pairs == [("model.path", "null"), ("optim.max_norm", None), ("model.lora_rank", 4)]


def test_scientific_notation_is_a_number_where_nothing_else_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {shape: {eps: 1e-6, big: 2E3, name: e5}}")
    assert load_config(Root, path).model.shape == {"eps": 1e-6, "big": 2000.0, "name": "e5"}
    assert load_config(Root, None, ["--model.shape.eps", "1e-6"]).model.shape == {"eps": 1e-6}


def test_a_negative_number_is_a_value() -> None:
    assert parse_overrides(Root, ["--steps", "-1"]) == [("steps", -1)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim": {"lrr": 1}}, "unknown key optim.lrr (value 1): did you mean optim.lr?"),
        ({"optimm": {}}, "unknown key optimm (value {}): did you mean optim?"),
        ({"lora_rank": 2}, "unknown key lora_rank (value 2): did you mean model.lora_rank?"),
        ({"zzz": 2}, "unknown key zzz (value 2): the configuration has steps, model, optim, extra"),
        ({"steps": "many"}, "steps = 'many': expected an integer"),
        ({"optim": {"lr": "fast"}}, "optim.lr = 'fast': expected a number"),
        ({"optim": {"max_norm": "big"}}, "optim.max_norm = 'big': expected a number or null"),
        (
            {"optim": {"schedule": "cosin"}},
            "optim.schedule = 'cosin': expected one of constant, cosine; did you mean cosine?",
        ),
        ({"optim": {"betas": ["x"]}}, "optim.betas = 'x': expected a list with items of: a number"),
        ({"optim": {"lr": -1}}, "optim.lr = -1.0: expected a positive number"),
        ({"optim": 3}, "optim = 3: expected a section with the keys lr, betas, schedule, max_norm"),
        ({"model": {"compile": "maybe"}}, "model.compile = 'maybe': expected true or false"),
        ({"model": {"shape": 1}}, "model.shape = 1: expected a mapping"),
    ],
)
def test_a_mistake_names_path_value_expectation_and_nearest_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(Root, values)
    assert str(caught.value) == message


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(Root, {"steps": "x", "optim": {"lr": "y"}}, source="run.yaml")
    assert str(caught.value).splitlines() == [
        "run.yaml: steps = 'x': expected an integer",
        "run.yaml: optim.lr = 'y': expected a number",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["steps"], "'steps' is no setting"),
        (["--steps"], "--steps has no value"),
        (["--steps", "--optim.lr", "1"], "--steps has no value"),
        (["--steps", "[1"], "not valid YAML"),
    ],
)
def test_malformed_arguments(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        parse_overrides(Root, arguments)


def test_an_override_below_a_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 3")
    with pytest.raises(ConfigError, match="steps is 3, which has no keys below it"):
        load_config(Root, path, ["--steps.more", "1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "is not valid YAML"),
        ("- 1", "holds list, and a configuration is a mapping"),
        ("optim:\n  lr: 1\n  schedule: cosine\n  lr: 2", r"'lr' is there twice[^$]*line 4, column 3"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(Root, path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*absent\.yaml"):
        load_config(Root, tmp_path / "absent.yaml")


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    config = Root(optim=Optim(lr=1e-5, max_norm=None), model=Model(shape={"layers": [1, 2]}, path="ü"))
    path = tmp_path / "config.yaml"
    path.write_text(config_to_yaml(config), encoding="utf-8")
    assert load_config(Root, path) == config


def test_an_optional_section_is_off_until_a_key_of_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config_to_yaml(Root()))
    assert load_config(Root, path).extra is None
    assert load_config(Root, path, ["--extra.rank", "4"]).extra == Extra(rank=4)
    assert load_config(Root, None, ["--extra", "null"]).extra is None
    with pytest.raises(ConfigError, match=r"unknown key extra\.rnk \(value 4\): did you mean extra\.rank\?"):
        load_config(Root, path, ["--extra.rnk", "4"])


@dataclass(frozen=True, kw_only=True)
class Preferring(Root):
    RECIPE: ClassVar[Mapping[str, Any]] = {"optim": {"lr": 5e-4, "schedule": "cosine"}}


def test_a_recipe_prefers_values_and_the_user_wins() -> None:
    assert build_config(Preferring, {"optim": {"lr": 1.0}}).optim == Optim(lr=1.0, schedule="cosine")
    assert next(key.default for key in keys_of(Preferring) if key.path == "optim.lr") == 5e-4


def test_a_mistake_in_a_file_names_it_and_one_on_the_command_line_does_not(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: many")
    with pytest.raises(ConfigError) as caught:
        load_config(Root, path, ["--optim.lr", "fast"])
    lines = [f"{path}: steps = 'many': expected an integer", "optim.lr = 'fast': expected a number"]
    assert str(caught.value).splitlines() == lines


def test_keys_carry_their_documentation() -> None:
    keys = {key.path: key for key in keys_of(Root)}
    assert keys["optim.lr"].doc == "step size"
    assert keys["optim.max_norm"].doc == "clip the gradient's norm here; None: never"
    assert keys["optim.max_norm"].expects == "a number or null"
    assert keys["optim.betas"].default == (0.9, 0.99)
    assert list(keys)[:3] == ["steps", "model.path", "model.shape"]
    assert keys["extra.rank"].doc.endswith(" extra is off until a key of it is given")
