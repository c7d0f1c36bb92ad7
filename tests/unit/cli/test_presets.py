"""``podium train grpo --recipe NAME``: the settings of a paper, below those of the user."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podium.algorithms import check_functions
from podium.cli import main
from podium.cli.presets import list_presets, read_preset
from podium.cli.train import _config
from podium.config import load_config, read_values
from podium.errors import ConfigError
from podium.trainer import GRPOConfig

NAMES = ["cispo", "dapo", "dppo", "dr_grpo", "grpo", "gspo", "opd", "reinforce_pp", "rloo"]


def test_the_presets_are_files() -> None:
    assert list_presets() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_a_whole_algorithm_of_a_paper(name: str) -> None:
    preset = read_preset(name)
    assert "arXiv:" in preset.source
    config = load_config(GRPOConfig, None, preset.overrides({}))
    needed = {"teacher": "there"} if name == "opd" else {}
    check_functions(replace(config.algorithm, options=needed))
    origins = config.algorithm.explain()
    assert "recipe" not in origins["aggregation"].origin or name in ("rloo", "reinforce_pp", "dppo")
    assert all(
        getattr(config.algorithm, key.partition(".")[2]) == value
        for key, value in preset.settings.items()
        if key.startswith("algorithm.")
    )


def test_figures_of_the_papers() -> None:
    found = {name: load_config(GRPOConfig, None, read_preset(name).overrides({})).algorithm for name in NAMES}
    bounds = {name: algorithm.clip_bounds for name, algorithm in found.items() if name not in ("opd", "rloo")}
    plain = dict.fromkeys(("dr_grpo", "grpo", "reinforce_pp"), (0.2, 0.2))
    assert bounds == {
        **plain, "cispo": (1.0, 4.0), "dapo": (0.2, 0.28), "dppo": (0.15, 0.15), "gspo": (3e-4, 4e-4)
    }  # fmt: skip
    assert found["dr_grpo"].aggregation_mode == "sequence-sum-constant"
    assert (found["grpo"].kl_in, found["grpo"].kl_coef) == ("loss", 0.04)


def test_settings_of_the_user_come_before_those_of_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("algorithm: {kl_coef: 0.5, clip_high: 0.3}\n")
    words = read_preset("grpo").overrides({"algorithm": {"kl_coef": 0.5, "clip_high": 0.3}})
    config = _config("grpo", str(file), None, [*words, "--algorithm.clip_low", "0.1"])
    assert isinstance(config, GRPOConfig)
    algorithm = config.algorithm
    assert (algorithm.kl_coef, algorithm.clip_bounds, algorithm.kl_in) == (0.5, (0.1, 0.3), "loss")


def test_a_dry_run_prints_the_paper_and_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "grpo", "--recipe", "gspo", "--dry-run"]) == 2  # data.train is not set
    assert "preset       gspo: GSPO: Zheng et al. 2025, arXiv:2507.18071" in (out := capsys.readouterr().out)
    assert "algorithm.loss = gspo, algorithm.minibatches = 4" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grpo", "--recipe", "dapoo"], "there is no such preset; did you mean dapo?; there are cispo, dapo"),
        (["sft", "--recipe", "dapo"], "has settings of podium train grpo, not of podium train sft"),
        (["grpo", "--recipe", "dapo", "--resume", "runs/x"], "leave out --recipe"),
        (["dapo"], "dapo is a preset of the recipe grpo: podium train grpo --recipe dapo"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["train", *words]) == 2
    except SystemExit as stopped:  # of argparse
        assert stopped.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_unknown_preset_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="there are cispo"):
        read_preset("nothing")


@pytest.mark.parametrize(
    ("values", "words", "count"),
    [
        ("", ["--batch.prompts", "8"], 8),
        ("", ["--batch.prompts=8"], 8),
        ("batch: {prompts: 8}\n", [], 8),
        ("batch: {prompts: {count: 8}}\n", [], 8),
        ("batch: {prompts: 4}\n", ["--batch.prompts", "8"], 8),
        ("run: {steps: 3}\n", [], 16),
    ],
)
def test_a_number_of_prompts_leaves_the_filter_of_the_preset(
    values: str, words: list[str], count: int, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(values)
    own = read_values(GRPOConfig, tmp_path / "run.yaml")
    config = load_config(GRPOConfig, tmp_path / "run.yaml", read_preset("dapo").overrides(own, words))
    prompts: Any = config.batch.prompts
    assert prompts == {"count": count, "filter": "rewards", "refills": 9}


def test_a_mapping_of_the_user_replaces_that_of_the_preset() -> None:
    words = ["--batch.prompts", "{count: 8, filter: none}"]
    prompts: Any = load_config(GRPOConfig, None, read_preset("dapo").overrides({}, words)).batch.prompts
    assert prompts == {"count": 8, "filter": "none"}


def test_a_mapping_of_the_user_takes_the_place_of_the_presets_entries() -> None:
    preset = replace(read_preset("grpo"), settings={"algorithm.options.dual_clip": 3.0, "algorithm.clip_high": 0.3})
    algorithm = load_config(GRPOConfig, None, preset.overrides({}, ["--algorithm.options={weight_cap: 4}"])).algorithm
    assert (dict(algorithm.options), algorithm.clip_high) == ({"weight_cap": 4}, 0.3)
