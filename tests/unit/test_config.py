"""Configuration: what is read, and what a mistake looks like."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import pytest
from pydantic import Field

from podium.config import (
    build_config,
    config_to_dict,
    config_to_yaml,
    keys_of,
    load_config,
    parse_overrides,
    prefer,
    section,
)
from podium.errors import ConfigError
from podium.rewards import RewardConfig
from podium.trainer import GRPOConfig


@section("optim")
class Optim:
    """The optimizer."""

    lr: float = Field(default=1e-3, gt=0, le=10)
    """The optimizer takes steps of this size."""
    betas: tuple[float, ...] = (0.9, 0.99)
    """AdamW averages with these rates."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The step size follows this curve."""
    max_norm: float | None = Field(default=1.0, ge=0)
    """The gradient's norm is clipped here. null
    never clips."""
    warmup: int = Field(default=0, ge=0)
    """The step size rises over this many steps."""

    def __post_init__(self) -> None:
        if self.warmup and self.schedule == "constant":
            raise ConfigError("optim.warmup needs a schedule")


@section("model")
class Model:
    path: str = ""
    shape: Mapping[str, Any] = Field(default_factory=dict)
    lora_rank: int = 0
    compile: bool = False


@section("extra")
class Extra:
    """More."""

    rank: int = 8
    """The update has this rank."""


@section()
class Root:
    steps: int = 10
    model: Model = Field(default_factory=Model)
    optim: Optim = Field(default_factory=Optim)
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


def test_true_and_false_are_values_of_keys_that_take_them() -> None:
    model = load_config(Root, None, ["--model.compile", "true", "--model.shape.tied", "true"]).model
    assert (model.compile, model.shape) == (True, {"tied": True})


def test_a_negative_number_is_a_value() -> None:
    assert parse_overrides(Root, ["--steps", "-1"]) == [("steps", -1)]


SECTIONS = "steps, model, optim, extra"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim": {"lrr": 1}}, "unknown key optim.lrr (value 1); did you mean optim.lr?"),
        ({"optimm": {}}, "unknown key optimm (value {}); did you mean optim?"),
        ({"lora_rnk": 2}, f"unknown key lora_rnk (value 2): the configuration has {SECTIONS}"),  # of another section
        (
            {"warmup": 2},
            f"unknown key warmup (value 2): keys of this name are optim.warmup; the configuration has {SECTIONS}",
        ),
        ({"zzz": 2}, "unknown key zzz (value 2): the configuration has steps, model, optim, extra"),
        ({3: 2}, "unknown key 3: the configuration has steps, model, optim, extra"),
        ({"steps": "many"}, "steps = 'many': expected an integer"),
        ({"steps": 2.5}, "steps = 2.5: expected an integer"),
        ({"optim": {"lr": "fast"}}, "optim.lr = 'fast': expected a number above 0 and at most 10"),
        ({"optim": {"max_norm": "big"}}, "optim.max_norm = 'big': expected a number of at least 0 or null"),
        ({"optim": {"max_norm": -1}}, "optim.max_norm = -1: expected a number of at least 0 or null"),
        (
            {"optim": {"max_norm": float("inf")}},
            "optim.max_norm = inf: expected a finite number of at least 0 or null",
        ),
        ({"optim": {"lr": float("nan")}}, "optim.lr = nan: expected a finite number above 0 and at most 10"),
        (
            {"optim": {"schedule": "cosin"}},
            "optim.schedule = 'cosin': expected one of constant, cosine; did you mean cosine?",
        ),
        ({"optim": {"betas": ["x"]}}, "optim.betas = 'x': expected a list; each item is a number"),
        ({"optim": {"warmup": 3}}, "optim.warmup needs a schedule"),
        ({"optim": 3}, "optim = 3: expected a section with the keys lr, betas, schedule, max_norm, warmup"),
        ({"optim": None}, "optim = None: expected a section with the keys lr, betas, schedule, max_norm, warmup"),
        ({"steps": True}, "steps = True: expected an integer"),
        ({"optim": {"lr": True}}, "optim.lr = True: expected a number above 0 and at most 10"),
        ({"optim": {"max_norm": False}}, "optim.max_norm = False: expected a number of at least 0 or null"),
        ({"optim": {"betas": [0.9, True]}}, "optim.betas = [0.9, True]: expected a list; each item is a number"),
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
        build_config(Root, {"steps": "x", "optim": {"lr": "y", "llr": 1}}, source="run.yaml")
    assert sorted(str(caught.value).splitlines()) == [
        "run.yaml: optim.lr = 'y': expected a number above 0 and at most 10",
        "run.yaml: steps = 'x': expected an integer",
        "run.yaml: unknown key optim.llr (value 1); did you mean optim.lr?",
    ]


def test_a_section_is_checked_where_it_is_built() -> None:
    for make in (lambda: Optim(lr=-1, warmup=-1), lambda: dataclasses.replace(Optim(), lr=-1, warmup=-1)):
        with pytest.raises(ConfigError) as caught:
            make()
        assert str(caught.value).splitlines() == [
            "optim.lr = -1: expected a number above 0 and at most 10",
            "optim.warmup = -1: expected an integer of at least 0",
        ]
    with pytest.raises(ConfigError, match=r"unknown key optim\.lrr \(value 1\); did you mean optim\.lr\?"):
        Optim(lrr=1)  # pyright: ignore[reportCallIssue] - the point of the test
    with pytest.raises(ConfigError, match=r"^optim\.warmup needs a schedule$"):
        Optim(warmup=3)


def test_a_section_is_a_value() -> None:
    section = Optim(lr=1e-4)
    assert section == Optim(lr=1e-4)
    assert hash(section) == hash(Optim(lr=1e-4))
    assert dataclasses.replace(section, lr=1e-3) == Optim()
    assert pickle.loads(pickle.dumps(section)) == section
    assert cloudpickle.loads(cloudpickle.dumps(section)) == section
    with pytest.raises(dataclasses.FrozenInstanceError):
        section.lr = 1.0  # pyright: ignore[reportAttributeAccessIssue] - the point of the test


def test_a_section_of_a_script_travels_by_value() -> None:
    script = (
        "import sys, cloudpickle\nfrom pydantic import Field\nfrom podium.config import section\n"
        "@section('mine')\nclass Mine:\n    share: float = Field(default=0.5, le=1)\n"
        "sys.stdout.write(cloudpickle.dumps((Mine, Mine(share=0.25))).hex())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    cls, value = pickle.loads(bytes.fromhex(done.stdout))
    assert value == cls(share=0.25)
    with pytest.raises(ConfigError, match=r"mine\.share = 2: expected a number of at most 1"):
        cls(share=2)


@section()
class Options:
    """Options of a component, as a user's file may define them."""

    alpha: float = Field(default=0.5, ge=0, le=1)
    """The component mixes by this share."""


def test_options_are_checked_under_the_key_that_holds_them() -> None:
    assert build_config(Options, {"alpha": 1}, key="algorithm.options") == Options(alpha=1.0)
    with pytest.raises(ConfigError) as caught:
        build_config(Options, {"alpha": 2, "alhpa": 1}, key="algorithm.options")
    assert str(caught.value).splitlines() == [
        "algorithm.options.alpha = 2: expected a number from 0 to 1",
        "unknown key algorithm.options.alhpa (value 1); did you mean algorithm.options.alpha?",
    ]
    with pytest.raises(ConfigError, match=r"^algorithm.options.alpha = '1': expected a number from 0 to 1$"):
        build_config(Options, {"alpha": "1"}, key="algorithm.options")


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


def test_a_file_of_toml_is_told_from_yaml_and_one_text_from_a_list(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("steps = 3\n[optim]\nlr = 1\n")
    with pytest.raises(ConfigError, match=r"run\.toml holds str, .* in YAML, such as `optim: \{lr: 1e-4\}`$"):
        load_config(Root, path)
    path.write_text("[optim]\nlr = 1\n")
    with pytest.raises(ConfigError, match=r"run\.toml is not valid YAML, such as `optim: [^$]* in line \d"):
        load_config(Root, path)
    with pytest.raises(ConfigError, match=r"expected a list; each item is text; did you mean \[TOKEN\]\?$"):
        load_config(RewardConfig, None, ["--env", "TOKEN"])


def test_times_dates_and_numbers_with_a_zero_before_them_are_no_other_numbers(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {shape: {at: 1:30, lap: 1:30.5, day: 2024-01-31, when: 2024-01-31T10:00:00, id: 007, mask: 0x1F}}"
    )
    shape = load_config(Root, path).model.shape
    texts = {"at": "1:30", "lap": "1:30.5", "day": "2024-01-31", "when": "2024-01-31T10:00:00"}
    assert shape == {**texts, "id": 7, "mask": 31}
    config = load_config(
        Root, None, ["--model.shape.day", "2024-01-31", "--model.shape", "{at: 1:30, day: 2024-01-31}"]
    )
    path.write_text(config_to_yaml(config))
    assert load_config(Root, path).model.shape == config.model.shape == {"at": "1:30", "day": "2024-01-31"}
    with pytest.raises(ConfigError, match=r"--steps 010 is not valid YAML: a number that begins with 0 is octal"):
        load_config(Root, None, ["--steps", "010"])


def test_a_mapping_that_would_drop_an_earlier_override_is_refused() -> None:
    words = ["--model.shape.layers", "2", "--model.shape"]
    message = r"^--model\.shape comes behind --model\.shape\.layers and would replace it: write --model\.shape first$"
    for value in ("{heads: 4}", "{layers: 3}", "null"):
        with pytest.raises(ConfigError, match=message):
            parse_overrides(Root, [*words, value])
    assert load_config(Root, None, [*words, "{layers: 2, heads: 4}"]).model.shape == {"layers": 2, "heads": 4}
    assert load_config(Root, None, [*words[2:], "{heads: 4}", *words[:2]]).model.shape == {"layers": 2, "heads": 4}


def test_an_override_below_a_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 3")
    with pytest.raises(ConfigError, match="steps is 3, which has no keys below it"):
        load_config(Root, path, ["--steps.more", "1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "is not valid YAML"),
        ("steps: 0x" + "f" * 5000, "a whole number has 20000 bits, and 64 are the most"),
        ("steps: 1:30", "steps = '1:30': expected an integer"),
        ("steps: 3\nextra: {rank: 010}", r"a number that begins with 0 is octal[^$]*line 2, column 15"),
        ("steps: !!set {a, b}", "a value is of type set: write it as text"),
        ("steps: !!binary aGk=", "a value is of type bytes"),
        ("steps: !!omap [a: 1]", "a value is of type tuple"),
        ("- 1", "holds list, and a configuration is a mapping"),
        ("optim.lr: 1", r"unknown key optim\.lr \(value 1\): write it within its section, as optim: \{lr: VALUE\}$"),
        ("optim:\n  lr: 1\n  schedule: cosine\n  lr: 2", r"'lr' appears twice[^$]*line 4, column 3"),
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


@pytest.mark.parametrize("value", ["1e5", "-12E+07", "1.e5", "007", "yes", "1_000", "~", math.inf, 1e5, {3: 4, "x": 5}])
def test_an_option_reads_back_as_what_it_was(value: Any, tmp_path: Path) -> None:
    config = Root(model=Model(shape={"option": value}, path=str(value)))
    path = tmp_path / "config.yaml"
    path.write_text(config_to_yaml(config), encoding="utf-8")
    assert repr(load_config(Root, path)) == repr(config)
    assert repr(build_config(Root, config_to_dict(config))) == repr(config)


def test_an_optional_section_is_off_until_a_key_of_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config_to_yaml(Root()))
    assert load_config(Root, path).extra is None
    assert load_config(Root, path, ["--extra.rank", "4"]).extra == Extra(rank=4)
    assert load_config(Root, None, ["--extra", "null"]).extra is None
    with pytest.raises(ConfigError, match=r"unknown key extra\.rnk \(value 4\); did you mean extra\.rank\?"):
        load_config(Root, path, ["--extra.rnk", "4"])


@section()
class Preferring(Root):
    optim: Optim = prefer(Optim, lr=5e-4, schedule="cosine")


def test_a_recipe_prefers_values_and_the_user_wins() -> None:
    assert build_config(Preferring, {"optim": {"lr": 1.0}}).optim == Optim(lr=1.0, schedule="cosine")
    assert Preferring().optim == Optim(lr=5e-4, schedule="cosine")
    assert next(key.default for key in keys_of(Preferring) if key.path == "optim.lr") == 5e-4


@pytest.mark.parametrize(
    "given", [{}, {"lr": 1.0}, {"max_norm": 2.0}, {"schedule": "constant", "lr": Optim().lr}], ids=str
)
def test_a_section_that_a_script_builds_keeps_what_the_recipe_prefers(given: dict[str, Any]) -> None:
    expected = build_config(Preferring, {"optim": given})
    built = Preferring(optim=Optim(**given))
    assert built == Preferring(optim=given) == build_config(Preferring, {"optim": Optim(**given)}) == expected  # type: ignore[arg-type]
    assert config_to_dict(built) == config_to_dict(expected)
    assert dataclasses.replace(built, steps=3).optim == pickle.loads(pickle.dumps(built)).optim == expected.optim
    for copied in (copy.copy, copy.deepcopy, lambda part: pickle.loads(cloudpickle.dumps(part))):
        part = copied(copied(Optim(**given)))
        assert part == Optim(**given) and repr(part) == repr(Optim(**given))
        assert Preferring(optim=part) == expected, "an exact copy names the keys that the section named"


def test_a_changed_copy_of_a_section_has_what_it_says() -> None:
    changed = dataclasses.replace(Optim(), max_norm=2.0)  # all keys of it are set
    assert Preferring(optim=changed).optim == changed
    assert Preferring(optim=dataclasses.replace(Preferring().optim, lr=1.0)).optim == Optim(lr=1.0, schedule="cosine")


def test_a_mistake_in_a_file_names_it_and_one_on_the_command_line_does_not(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: many")
    with pytest.raises(ConfigError) as caught:
        load_config(Root, path, ["--optim.max_norm", "fast"])
    assert set(str(caught.value).splitlines()) == {
        f"{path}: steps = 'many': expected an integer",
        "optim.max_norm = 'fast': expected a number of at least 0 or null",
    }


def test_keys_carry_their_documentation() -> None:
    keys = {key.path: key for key in keys_of(Root)}
    assert keys["optim.lr"].doc == "The optimizer takes steps of this size."
    assert keys["optim.max_norm"].doc == "The gradient's norm is clipped here. null never clips."
    assert keys["optim.max_norm"].expects == "a number of at least 0 or null"
    assert keys["optim.betas"].default == (0.9, 0.99)
    assert list(keys)[:3] == ["steps", "model.path", "model.shape"]
    assert keys["optim.lr"].section == "The optimizer."
    assert keys["extra.rank"].section == "More. extra is off until one of its keys is given."


def test_a_mistake_of_several_keys_is_of_the_file_unless_a_typed_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("optim: {warmup: 3}\n")
    for typed, message in (
        ([], f"{path}: optim.warmup needs a schedule"),
        (["--optim.lr", "1"], f"{path}: optim.warmup needs a schedule"),
        (["--optim.warmup", "4"], "optim.warmup needs a schedule"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(Root, path, typed)
        assert str(caught.value) == message
    path.write_text("algorithm: {advantage: grpo}\n")
    with pytest.raises(ConfigError, match=r"^sampling\.n = 1 with algorithm\.advantage = 'grpo'"):
        load_config(GRPOConfig, path, ["--sampling.n", "1"])
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}: .*\n?"):
        path.write_text("algorithm: {advantage: grpo}\nsampling: {n: 1}\n")
        load_config(GRPOConfig, path, ["--batch.prompts", "2"])


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("batch.completions", "keys whose help has this word are .*sampling\\.n.*; batch has prompts"),
        ("optim.sizes", "keys whose help has this word are optim.schedule, optim.lr, optim.warmup; optim has lr,"),
        ("optim.steps_over", "keys whose help has this word are optim.warmup; optim has lr,"),
        ("optim.of", "unknown key optim.of .value 4.: optim has lr,"),
    ],
)
def test_an_unknown_key_is_answered_by_those_whose_help_has_its_words(typed: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(GRPOConfig if typed.startswith("batch") else Root, None, [f"--{typed}", "4"])
