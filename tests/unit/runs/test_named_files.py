"""The files that a configuration names are found again where they or the run have moved, and differences are told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from podium.config import build_config, config_to_dict, load_config
from podium.errors import ConfigError, DataError
from podium.runs.named_code import remember_code
from podium.runs.named_files import PLACES, align_values, as_given, find_again, record, remarks
from podium.runs.paths import resolve_resume
from podium.trainer import GRPOConfig, SFTConfig

REWARD = "def score(completion, row):\n    return 1.0\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in the working directory: a model, data, a reward, and the run that was begun with them."""
    project = tmp_path / "old"
    (project / "model").mkdir(parents=True)
    (project / "model" / "config.json").write_text("{}")
    (project / "data").mkdir()
    for name in ("train", "easy", "hard"):
        (project / "data" / f"{name}.jsonl").write_text(f'{{"prompt": "{name}", "answer": "1"}}\n')
    (project / "rewards.py").write_text(REWARD)
    monkeypatch.chdir(project)
    begin(asked(), project / "runs" / "one")
    (project / "runs" / "one" / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n')
    return project


def asked(**sections: dict[str, Any]) -> GRPOConfig:
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "one"},
        "model": {"path": "model"},
        "data": {"train": "data/*n.jsonl", "eval": {"hard": "data/hard.jsonl"}},
        "reward": {"name": "rewards.py:score"},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return build_config(GRPOConfig, values)


def begin(config: GRPOConfig | SFTConfig, run: Path) -> None:
    run.mkdir(parents=True, exist_ok=True)
    text, places = record(config, run)
    (run / "config.yaml").write_text(text)
    (run / PLACES).write_text(places)
    remember_code(run, config, begun=True)


def paths(config: GRPOConfig | SFTConfig) -> list[str]:
    return [config.model.path, str(config.data.train), *config.data.eval_sets.values(), str(config.reward.name)]


def resumed(run: str | Path, *overrides: str) -> GRPOConfig:
    return resolve_resume(load_config(GRPOConfig, Path(run) / "config.yaml", [*overrides, "--run.resume", str(run)]))


def test_config_yaml_is_read_the_same_from_any_working_directory(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = resumed(project / "runs" / "one")
    names = ["model", "data/*n.jsonl", "data/hard.jsonl", "rewards.py:score"]
    assert paths(config) == [str(project / name) for name in names]
    assert remarks(config, project / "runs" / "one") == []
    assert (project / "runs" / "one" / "config.yaml").read_text().startswith("# Paths are absolute.")


def test_config_yaml_says_what_null_means(project: Path) -> None:
    config = asked(algorithm={"loss": "gspo", "clip_low": 0.1, "kl_target": None})
    begin(config, run := project / "runs" / "two")
    text = (run / "config.yaml").read_text()
    assert "\n  clip_low: 0.1\n" in text
    assert "\n  clip_high: null  # 0.0004, default of the loss gspo: Zheng et al. 2025" in text
    assert "\n  aggregation: null  # sequence-mean, default of the loss gspo" in text
    assert "\n  normalize_advantage: null  # true, default of the advantage grpo" in text
    assert "\n  kl_target: null\n" in text
    assert load_config(GRPOConfig, run / "config.yaml").algorithm == config.algorithm
    begin(SFTConfig(model=config.model, data=config.data), run)  # which has no algorithm


def test_a_path_whose_name_is_not_utf8_is_refused_by_its_key(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's config.yaml could not be read again."""
    project.rename(moved := project.with_name("caf\udce9"))
    monkeypatch.chdir(moved)
    with pytest.raises(ConfigError, match=r"the path of model\.path is '.*\\udce9/model', which is not UTF-8"):
        record(asked(), project / "runs" / "two")


def test_a_name_of_the_hub_and_words_are_no_paths(project: Path) -> None:
    (project / "auto").write_text("")
    config = asked(model={"path": "Qwen/Qwen3-0.6B"}, data={"train": "openai/gsm8k"}, reward={"name": "gsm8k"})
    begin(config, project / "runs" / "two")
    stored = load_config(GRPOConfig, project / "runs" / "two" / "config.yaml")
    assert paths(stored) == ["Qwen/Qwen3-0.6B", "openai/gsm8k", str(project / "data/hard.jsonl"), "gsm8k"]
    assert stored.data.chat_template == "auto"


def test_all_is_found_where_the_whole_project_has_moved(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = project.rename(project.with_name("new"))
    monkeypatch.chdir(new / "data")  # not the directory from which the run was begun
    run = Path("../runs/one")
    config = resumed(run)
    names = ["model", "data/*n.jsonl", "data/hard.jsonl", "rewards.py:score"]
    assert paths(config) == [str(new / name) for name in names]
    keys = "model.path, data.train, reward.name, data.eval.hard"
    assert remarks(config, run) == [f"moved from {project} to {new}: {keys}"]
    begin(config, run)  # as a resume does
    assert paths(load_config(GRPOConfig, run / "config.yaml")) == paths(config)
    assert remarks(resumed(run), run) == [], "it is said once"
    shown = as_given(config_to_dict(config), run)
    assert (shown["model"]["path"], shown["reward"]["name"]) == ("model", "rewards.py:score"), "as the user wrote it"


def test_the_file_of_an_environment_is_found_again(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "worlds.py").write_text("async def play(task, client): return 1.0\n")
    config = asked(environment={"name": "worlds.py:play", "options": {"at_once": 2}})
    begin(config, project / "runs" / "two")
    new = project.rename(project.with_name("new"))
    monkeypatch.chdir(new / "data")
    run = new / "runs" / "two"
    config = resumed(run)
    assert config.environment.name == f"{new / 'worlds.py'}:play"
    assert any("environment.name" in remark for remark in remarks(config, run))
    begin(config, run)  # as a resume does
    assert as_given(config_to_dict(config), run)["environment"]["name"] == "worlds.py:play"
    (new / "worlds.py").write_text("async def play(task, client): return 2.0\n")
    assert any("has changed since the run began" in remark for remark in remarks(config, run))
    (new / "worlds.py").unlink()
    with pytest.raises(
        ConfigError, match=r"environment\.name: the file of the run is gone.* give its place with --environment\.name"
    ):
        resumed(run)


def test_a_run_that_moved_alone_is_begun_from_the_working_directory(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine: the run lies elsewhere, and the project is the working directory, as it was."""
    run = (project / "runs" / "one").rename(tmp_path / "one")
    new = project.rename(tmp_path / "new")
    monkeypatch.chdir(new)
    config = resumed(run)
    assert config.data.train == str(new / "data/*n.jsonl")
    assert remarks(config, run) == [
        f"moved from {project} to {new}: model.path, data.train, reward.name, data.eval.hard"
    ]
    (new / "data").rename(new / "texts")
    with pytest.raises(
        ConfigError, match=r"data/\*n\.jsonl from the run\), .*data/\*n\.jsonl from the working directory\)"
    ):
        resumed(run)


def test_what_is_gone_is_named_with_where_it_was_looked_for_and_its_key(project: Path) -> None:
    run = project / "runs" / "one"
    (project / "data").rename(project / "texts")
    (project / "rewards.py").unlink()
    with pytest.raises(ConfigError) as error:
        resumed(run)
    train, reward, held_out = str(error.value).splitlines()
    assert train == (
        f"data.train: the file of the run is gone; it was looked for at {project}/data/*n.jsonl; give its "
        "place with --data.train"
    )
    assert reward.endswith("give its place with --reward.name")
    assert held_out.endswith("give its place with --data.eval")
    config = resumed(
        run, "--data.train", "texts/train.jsonl", "--data.eval", "texts/hard.jsonl", "--reward.name", "exact"
    )
    assert config.data.train == "texts/train.jsonl"


@pytest.mark.parametrize("at_once", [True, False])
def test_another_content_is_said(project: Path, at_once: bool) -> None:
    run = project / "runs" / "one"
    (project / "data" / "train.jsonl").write_text("{}\n" if at_once else '{"prompt": "Train", "answer": "1"}\n')
    said = "it had 35 bytes and now has 3" if at_once else "its content differs"
    where = project / "data" / "*n.jsonl"
    assert remarks(resumed(run), run) == [f"data.train: {where} has changed since the run began: {said}"]


def test_auto_sees_no_difference_in_another_way_to_the_same_file(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    auto = {"resume": "auto", "dir": str(project / "runs")}
    assert resolve_resume(asked(run=auto)).run.resume
    monkeypatch.chdir(project / "data")
    ways = {"train": f"{project}/data/*n.jsonl", "eval": {"hard": "hard.jsonl"}}
    found = asked(run=auto, model={"path": "../model"}, data=ways, reward={"name": "../rewards.py:score"})
    assert resolve_resume(found).model.path == "../model", "what is given counts"
    (tmp_path / "link").symlink_to(project / "model")
    assert resolve_resume(
        asked(run=auto, model={"path": str(tmp_path / "link")}, data=ways, reward=found_reward(project))
    )


def found_reward(project: Path) -> dict[str, str]:
    return {"name": f"{project}/rewards.py:score"}


def test_auto_sees_each_difference_there_is(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    auto = {"resume": "auto", "dir": str(project / "runs")}
    with pytest.raises(
        ConfigError, match=r"data\.eval\.hard = 'data/easy\.jsonl', and the run has '.*/data/hard\.jsonl'"
    ):
        resolve_resume(asked(run=auto, data={"eval": {"hard": "data/easy.jsonl"}}))
    (project / "rewards.py").write_text(REWARD + "other = score\n")
    with pytest.raises(ConfigError, match=r"reward\.name = 'rewards\.py:other'"):
        resolve_resume(asked(run=auto, reward={"name": "rewards.py:other"}))
    shutil.copytree(project, tmp_path / "another")  # the same names in another working directory
    monkeypatch.chdir(tmp_path / "another")
    with pytest.raises(ConfigError, match=r"data\.train = 'data/\*n\.jsonl', and the run has '.*old/data/\*n\.jsonl'"):
        resolve_resume(asked(run=auto))


def test_auto_takes_a_copy_of_run_and_data_for_the_same_unless_the_data_differ(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = shutil.copytree(project, tmp_path / "copy")
    monkeypatch.chdir(copy)
    config = resolve_resume(asked(run={"resume": "auto"}))
    assert config.run.resume == "runs/one"
    assert remarks(config, Path("runs/one")) == []
    (copy / "data" / "train.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"cannot be resumed with other settings:\n  data\.train = "):
        resolve_resume(asked(run={"resume": "auto"}))


def test_names_of_sets_stay_when_their_paths_become_absolute(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (project / name).mkdir()
        shutil.copy("data/hard.jsonl", project / name / "test.jsonl")
    sets = ["a/test.jsonl", "b/test.jsonl"]
    config = asked(data={"eval": sets}, run={"name": "two", "resume": "auto"})
    begin(config, project / "runs" / "two")
    assert load_config(GRPOConfig, project / "runs" / "two" / "config.yaml").data.eval_sets == {
        name: str(project / name) for name in sets
    }
    assert resolve_resume(config).run.resume == "runs/two"
    plain = asked(data={"eval": ["data/easy.jsonl", "data/hard.jsonl"]}, run={"name": "three", "resume": "auto"})
    begin(plain, project / "runs" / "three")
    assert list(load_config(GRPOConfig, project / "runs" / "three" / "config.yaml").data.eval_sets) == ["easy", "hard"]
    assert resolve_resume(plain).run.resume == "runs/three"


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '{"a": {"given": 1, "from_run": ""}}', '{"a": {"x": 1}}'])
def test_places_that_cannot_be_read_are_refused(project: Path, text: str) -> None:
    run = project / "runs" / "one"
    config = resumed(run)
    (run / PLACES).write_text(text)
    for read in (find_again, remarks):
        with pytest.raises(DataError, match=r"places\.json: .*put the run's own file back"):
            read(config, run)
    (run / PLACES).unlink()
    assert find_again(config, run) == config
    assert remarks(config, run) == []
    begin(config, run)
    assert json.loads((run / PLACES).read_text()).keys() > {str(project / "model")}


@pytest.mark.parametrize("weights", [False, True])
def test_several_training_sources_are_found_again(
    project: Path, monkeypatch: pytest.MonkeyPatch, weights: bool
) -> None:
    names = ["data/easy.jsonl", "openai/gsm8k", "data/train.jsonl"]
    train: Any = dict(zip(names, (3.0, 1.0, 0.5), strict=True)) if weights else names
    config = asked(data={"train": train})
    run = project / "runs" / "two"
    begin(config, run)
    stored = config_to_dict(load_config(GRPOConfig, run / "config.yaml"))
    absolute = [str(project / "data/easy.jsonl"), "openai/gsm8k", str(project / "data/train.jsonl")]
    assert [*stored["data"]["train"]] == absolute
    assert [*as_given(stored, run)["data"]["train"]] == names, "they are shown as the user wrote them"
    assert align_values(config_to_dict(config), stored, run)["data"]["train"] == stored["data"]["train"]
    new = project.rename(project.with_name("new"))
    monkeypatch.chdir(new / "data")
    run = new / "runs" / "two"
    found = resumed(run)
    assert [*found.data.train] == [str(new / "data/easy.jsonl"), "openai/gsm8k", str(new / "data/train.jsonl")]
    assert [*found.data.weights.values()] == ([3.0, 1.0, 0.5] if weights else [])
    assert remarks(found, run)[0].startswith(f"moved from {project} to {new}: ")
    (new / "data/easy.jsonl").unlink()
    with pytest.raises(
        ConfigError, match=r"data\.train: the file of the run is gone.*give its place with --data\.train"
    ):
        resumed(run)
