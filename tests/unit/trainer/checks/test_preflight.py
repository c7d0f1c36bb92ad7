"""What is checked before a run starts: lengths, and what a script gave the run that it resumes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from podium.cli import main
from podium.config import build_config, config_to_yaml
from podium.errors import CheckpointError, ConfigError
from podium.models import ModelConfig, char_tokenizer, load_model, load_tokenizer
from podium.models.loading import position_limit
from podium.rollout.tasks import Example
from podium.runs.named_files import record
from podium.trainer import GRPOConfig, PPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from podium.trainer.checks.preflight import (
    check_config,
    check_given,
    check_lengths,
    check_settings,
    check_verdicts,
    names_of_given,
)
from podium.workers import Policy
from podium_preferences.config import DPOConfig
from tests.integration.rewards import longer_is_better
from tests.integration.training import MODEL, metrics_rows, tiny
from tests.unit.rollout.tasks.test_encode import notes_of
from tests.unit.training.families import LONGROPE


def longer(completion: str, row: Mapping[str, Any]) -> float:
    return float(len(completion))


class Mine(Policy):
    pass


def test_names_are_those_of_functions_classes_and_bound_classes(tmp_path: Path) -> None:
    config = tiny(GRPOConfig, tmp_path)
    here = f"of the script, {__name__}."
    assert names_of_given(None, "exact", None) == {}
    assert names_of_given(longer, "exact", {"policy": Mine}) == {
        "policy": f"a class {here}Mine",
        "reward": f"a function {here}longer",
        "reward.name": "exact",
    }
    assert names_of_given(None, "exact", {"policy": Mine.bind(model=config.model)}) == {"policy": f"a class {here}Mine"}
    assert names_of_given(None, "exact", None, PPOTrainer) == {}
    assert names_of_given(None, "exact", None, Mine) == {"trainer": f"a class {here}Mine"}


@pytest.mark.parametrize(
    ("name", "weights", "penalties"),
    [
        (["exact", "overlong"], [], "overlong"),
        (["exact", "length", "repetition"], [1.0, 0.5, 0.1], "length, repetition"),
        ("overlong", [], "overlong"),
        (["exact", "overlong"], [1.0, 0.0], ""),
        (["exact", "overlong"], [1.0, -0.5], ""),
        (["exact", "fraction"], [], ""),
    ],
)
def test_penalties_are_refused_where_rewards_must_not_be_negative(
    name: Any, weights: list[float], penalties: str, tmp_path: Path
) -> None:
    values: dict[str, Any] = {"reward": {"name": name, "weights": weights}}
    check_settings(tiny(GRPOConfig, tmp_path, **values))
    config = tiny(GRPOConfig, tmp_path, **values, algorithm={"advantage": "maxrl"})
    if not penalties:
        check_settings(config)
        return
    with pytest.raises(ConfigError, match=rf"reward\.name has {penalties}, .*'maxrl' takes no rewards below 0: leave"):
        check_settings(config)
    if not weights:
        check_settings(config, [longer, "overlong"])  # nobody knows how low its own scores are


ONE_POOL = {"pools": {"all": {"roles": ["policy", "generator"]}}}
APART = {"pools": {"train": {"roles": ["policy"]}, "serve": {"roles": ["generator"]}}}
OWN_SCHEDULE = """
from podium.trainer.schedules import ScheduleDeclaration

def undeclared(steps): ...

@ScheduleDeclaration(overlaps=True)
def ahead(steps): ...
"""


@pytest.mark.parametrize(
    ("schedule", "placement", "why"),
    [
        ("sync", {}, ""),
        ("one_step_off", {}, "with placement.layout = colocated the generator reads.*set placement.layout to split"),
        ("asynchronous", ONE_POOL, "with policy and generator in one pool.*give the generator a pool of its own"),
        ("mine.py:ahead", {}, "with placement.layout = colocated"),
        ("mine.py:undeclared", {}, ""),
        ("one_step_off", {"layout": "split"}, ""),
        ("asynchronous", APART, ""),
    ],
)
def test_a_schedule_that_overlaps_halves_is_refused_where_the_generator_reads_the_policys_weights(
    schedule: str, placement: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN_SCHEDULE)
    config = tiny(GRPOConfig, tmp_path, run={"schedule": schedule}, placement=placement)
    if not why:
        return check_settings(config)
    with pytest.raises(
        ConfigError, match=rf"run\.schedule = '{schedule}' runs the halves.* at the same time, and {why}"
    ):
        check_settings(config)


def test_what_is_missing_is_named_unless_something_else_was_said() -> None:
    had = {"policy": "m.Mine", "reward": "m.longer", "reward.name": "exact"}
    check_given({}, {}, "exact")
    check_given(had, {**had, "reward": "m.another"}, "exact")
    check_given(had, {"policy": "m.Mine"}, "my_rewards.py:longer")
    with pytest.raises(ConfigError, match=r"its own policy \(m\.Mine\), reward \(m\.longer\), which"):
        check_given(had, {}, "exact")
    with pytest.raises(ConfigError, match=r"its own reward \(m\.longer\).*or name a reward with reward\.name"):
        check_given(had, {"policy": "m.Other"}, "exact")


def test_a_run_with_a_function_is_not_resumed_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"steps": 1}, eval={"items": 0})
    PPOTrainer(config, cluster="inline", reward=longer_is_better, show=False).fit()
    run = tmp_path / "runs" / "run"
    assert main(["train", "grpo", "--resume", str(run), "--run.steps", "2", "--backend", "inline"]) == 2
    name = longer_is_better.__module__
    assert f"reward.name is a function of the script, {name}.longer_is_better, which" in capsys.readouterr().err
    again = tiny(GRPOConfig, tmp_path, run={"steps": 2, "resume": str(run)}, eval={"items": 0})
    PPOTrainer(again, cluster="inline", reward=longer_is_better, show=False).fit()
    assert [row["step"] for row in metrics_rows(run)] == [1, 2]


def test_a_start_that_is_refused_for_an_option_leaves_no_directory(tmp_path: Path) -> None:
    trainer = PPOTrainer(tiny(GRPOConfig, tmp_path), cluster="inline", backend_options={"ecko": True}, show=False)
    with pytest.raises(ConfigError, match="unexpected keyword argument 'ecko'"):
        trainer.fit()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("sampling", "data", "message"),
    [
        (30, {}, r"longest training prompt, .*, line 2, has 3 tokens.*32 positions.*data\.max_prompt_tokens to 2 \("),
        (40, {}, r"32 positions: lower sampling\.max_new_tokens$"),
        (26, {"eval": "long.jsonl"}, r"longest held-out prompt, .*, line \d+, has 8 tokens"),
    ],
)
def test_a_prompt_that_the_model_has_no_room_for_is_found_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: int, data: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("long.jsonl").write_text('{"prompt": "1234567=", "answer": "1"}\n')
    config = tiny(GRPOConfig, tmp_path, sampling={"max_new_tokens": sampling}, data=data)
    with pytest.raises(ConfigError, match=message):
        PPOTrainer(config, cluster="inline", show=False).fit()
    assert not (tmp_path / "runs" / "run" / "config.yaml").exists()


@pytest.mark.parametrize("recipe", [GRPOConfig, SFTConfig])
def test_tokens_that_the_model_does_not_know_are_found_before_anything_starts(tmp_path: Path, recipe: Any) -> None:
    config = tiny(recipe, tmp_path, model={**MODEL, "config": {**MODEL["config"], "vocab_size": 13}})  # type: ignore[dict-item]
    trainer: Any = PPOTrainer if recipe is GRPOConfig else SFTTrainer
    with pytest.raises(ConfigError, match=r"such as '9' \(13\), are beyond the model's vocabulary of 13"):
        trainer(config, cluster="inline", show=False).fit()
    special = char_tokenizer("0123456789= ")
    special.add_special_tokens({"additional_special_tokens": ["<tool>"]})  # for which the model has no row
    special.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "images.jsonl").write_text('{"prompt": "1<tool>=", "answer": "1"}\n' * 40)
    model = {"config": {**MODEL["config"], "vocab_size": 16}, "tokenizer": str(tmp_path / "tokenizer")}  # type: ignore[dict-item]
    config = tiny(recipe, tmp_path, model=model, data={"train": str(tmp_path / "images.jsonl")})
    with pytest.raises(ConfigError, match=r"the training data have the token 16, and the model has a vocabulary of 16"):
        trainer(config, cluster="inline", show=False).fit()
    assert not (tmp_path / "runs" / "run" / "config.yaml").exists()


def test_a_run_is_not_resumed_with_another_tokenizer(tmp_path: Path) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"steps": 1}, eval={"items": 0})
    PPOTrainer(config, cluster="inline", show=False).fit()
    resume = {"steps": 2, "resume": str(tmp_path / "runs" / "run")}
    other = tiny(
        GRPOConfig, tmp_path, run=resume, model={**MODEL, "tokenizer": "chars:9876543210= "}, eval={"items": 0}
    )
    with pytest.raises(CheckpointError, match="of other data, whose prompts have other tokens"):
        PPOTrainer(other, cluster="inline", show=False).fit()


def test_generation_beyond_a_turn_of_rotary_factors_is_refused() -> None:
    model = ModelConfig(config=LONGROPE, tokenizer="chars:0123")
    assert position_limit(model) == 64
    examples = [Example("0", None, {}, place=f"rows.jsonl, line {line}") for line in (1, 2)]
    check_lengths(model, 10, "training", [6], examples[:1])
    said = r"prompt, rows.jsonl, line 2, has 7 .* 16 positions, beyond which longrope changes the rotation .*lower"
    with pytest.raises(ConfigError, match=said):
        check_lengths(model, 10, "training", [6, 7], examples)


@pytest.mark.parametrize("recipe", [GRPOConfig, SFTConfig])
@pytest.mark.parametrize("held_out", [False, True])
def test_rows_beyond_the_models_positions_are_left_out_as_bad_rows_are(
    tmp_path: Path, recipe: Any, held_out: bool
) -> None:
    """The model has 32 positions. A prompt needs room for 26 new tokens, a pair none."""
    long = {"prompt": "1234567=", "answer": "9" * 40}
    lines = [{"prompt": f"{number}=", "answer": "1"} for number in range(8)]
    for name, rows in (("good.jsonl", lines), ("bad.jsonl", [lines[0], long, long, long, long])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {name: str(tmp_path / f"{name}.jsonl") for name in ("good", "bad")}
    sides = {"train": data["good"], "eval": data["bad"]} if held_out else {"train": data["bad"], "eval": data["good"]}
    trainer: Any = PPOTrainer if recipe is GRPOConfig else SFTTrainer

    def start(**policy: str) -> list[str]:
        config = tiny(recipe, tmp_path, sampling={"max_new_tokens": 26}, data={**sides, **policy}, eval={"items": 8})
        return notes_of(lambda: trainer(config, cluster="inline", show=False).read_data())

    with pytest.raises(ConfigError, match="32 positions"):
        start()
    (note,) = [note for note in start(bad_rows="drop") if "positions" in note]
    what = "held-out" if held_out else "training"
    assert note.startswith(f"4 of the 5 {what} rows are too long for the model's positions")
    tokens = 8 if recipe is GRPOConfig else 49
    places = [f"{tmp_path}/bad.jsonl, line {line} ({tokens} tokens)" for line in (2, 3, 4)]
    assert note.endswith("the first of them: " + ", ".join(places))


def test_the_longest_text_is_the_models_own(tmp_path: Path) -> None:
    tiny_model = ModelConfig(**MODEL)
    assert position_limit(tiny_model) == 32
    load_model(tiny_model).save_pretrained(tmp_path)
    load_tokenizer(tiny_model.tokenizer).save_pretrained(tmp_path)
    assert position_limit(ModelConfig(path=str(tmp_path))) == 32
    with pytest.raises(ConfigError, match="its configuration cannot be read"):
        position_limit(ModelConfig(path=str(tmp_path / "absent")))


def test_code_in_the_directory_of_a_run_is_not_run_when_it_is_resumed_or_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "run"
    (run / "model").mkdir(parents=True)
    (run / "code.py").write_text(f"open({str(tmp_path / 'code was run')!r}, 'w')\ndef score(text, row): return 1.0\n")
    for key in ("reward.name", "algorithm.loss", "algorithm.advantage", "run.schedule"):
        section, _, field = key.partition(".")
        named = {section: {field: f"{run}/../run/code.py:score"}}
        config = tiny(GRPOConfig, tmp_path, **named)
        (run / "config.yaml").write_text(config_to_yaml(config))
        assert main(["train", "grpo", "--resume", str(run), "--backend", "inline"]) == 2
        assert f"{key} = " in (said := capsys.readouterr().err)
        assert "is code in the directory of the run itself" in " ".join(said.split())
        assert main(["train", "grpo", "--resume", str(run), "--dry-run"]) == 2
    monkeypatch.syspath_prepend(str(run))  # as for a user who works in that directory
    (run / "code.py").rename(run / "sneaky.py")
    asked = "names code that is not Podium's own"
    whys = {"sneaky:score": "is code in the directory of the run", "builtins:exec": asked, "runpy:run_path": asked}
    for name, why in whys.items():
        (run / "config.yaml").write_text(config_to_yaml(tiny(GRPOConfig, tmp_path, reward={"name": name})))
        for command in (["train", "grpo", "--resume", str(run), "--dry-run"], ["eval", str(run)]):
            assert main(command) == 2
            assert why in " ".join(capsys.readouterr().err.split())
    config = tiny(GRPOConfig, tmp_path, reward={"name": f"{run}/sneaky.py:score"})
    text, places = record(config, run)
    (run / "config.yaml").write_text(text.replace(str(run), "/elsewhere"))
    (run / "places.json").write_text(places.replace(f'"{run}', '"/elsewhere'))  # found again, beside the configuration
    assert main(["eval", str(run)]) == 2
    assert "is code in the directory of the run itself" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "code was run").exists()


class Own(PPOTrainer):
    """A trainer of a user's trainer_class."""


@pytest.mark.parametrize(
    ("trainer", "config", "expected"),
    [
        (
            PPOTrainer,
            {},
            r"PPOTrainer takes a PPOConfig, and was given a dict: .*build_config\(PPOConfig, ",
        ),
        (PPOTrainer, "run.yaml", r"a str: read the file by podium\.trainer\.load_config\(PPOConfig, 'run\.yaml'\)"),
        (PPOTrainer, Path("run.yaml"), r"load_config\(PPOConfig, 'run\.yaml'\)"),
        (PPOTrainer, SFTConfig(), "PPOTrainer takes a PPOConfig, and was given a SFTConfig: give it a PPOConfig"),
        (SFTTrainer, GRPOConfig(), "SFTTrainer takes a SFTConfig, and was given a GRPOConfig"),
        (Own, SFTConfig(), "Own takes a PPOConfig"),
        (Own, None, "Own takes a PPOConfig, and was given a NoneType"),
    ],
)
def test_a_trainer_refuses_the_configuration_of_another_recipe(trainer: Any, config: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        trainer(config)
    for trainer_class, right in ((PPOTrainer, GRPOConfig()), (Own, PPOConfig()), (SFTTrainer, SFTConfig())):
        check_config(trainer_class, right)


@pytest.mark.parametrize(
    ("values", "what", "remedy"),
    [
        ({"eval": {"metric": "accuracy"}}, "eval.metric = 'accuracy'", "eval.metric to reward or reward_parts/NAME"),
        (
            {"eval": {"metric": "pass@4", "temperature": {"temperature": 0.6, "n": 4}}},
            "eval.metric = 'pass@4'",
            "eval.metric to reward or reward_parts/NAME",
        ),
        ({"batch": {"prompts": {"filter": "accuracy"}}}, "batch.prompts.filter = 'accuracy'", "filter to rewards"),
        ({"batch": {"prompts": {"skip_solved": 1.0}}}, "batch.prompts.skip_solved = 1", "leave skip_solved out"),
        ({"batch": {"prompts": {"curriculum": "failures"}}}, "batch.prompts.curriculum = 'failures'", "leave curric"),
    ],
)
def test_the_sum_of_several_rewards_is_refused_where_it_would_be_a_verdict(
    values: dict[str, Any], what: str, remedy: str, tmp_path: Path
) -> None:
    """A prompt that was never solved had the pass rate 1, and accuracy was that of completions with any score of 1."""
    several = {"reward": {"name": ["exact", "fraction"]}}
    config = build_config(GRPOConfig, values | several)
    message = f"{re.escape(what)} with several rewards, .*set reward\\.correct_at to .*, or .*{re.escape(remedy)}"
    with pytest.raises(ConfigError, match=message):
        check_verdicts(config, None)
    with pytest.raises(ConfigError, match=message):
        check_settings(tiny(GRPOConfig, tmp_path, **values, **several))
    with pytest.raises(ConfigError, match=message):
        check_verdicts(build_config(GRPOConfig, values), [longer, "exact"])
    check_verdicts(config, longer)
    check_verdicts(build_config(GRPOConfig, several), None)
    for reward in ({"correct_at": 1.0}, {"weights": [1.0, 0.0]}):
        check_verdicts(build_config(GRPOConfig, values | {"reward": {**several["reward"], **reward}}), None)


def test_a_loss_that_judges_a_run_needs_no_verdicts() -> None:
    several = {"reward": {"name": ["exact", "fraction"]}}
    check_verdicts(build_config(SFTConfig, several), None)
    check_verdicts(build_config(DPOConfig, several | {"eval": {"metric": "accuracy"}}), None)
    with pytest.raises(ConfigError, match=r"eval\.metric = 'accuracy' with several rewards"):
        check_verdicts(build_config(SFTConfig, several | {"eval": {"metric": "accuracy"}}), None)
