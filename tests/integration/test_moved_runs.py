"""A run that was moved with all that it was begun with is resumed, evaluated, sampled, exported and shown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from podium.cli import main
from podium.config import config_to_dict
from podium.models import ModelConfig, load_model, load_tokenizer
from podium.models.loading import save_pretrained
from podium.trainer import GRPOConfig
from tests.integration.training import MODEL, tiny

REWARD = "def score(completion, row):\n    return float(completion[:1] == row['answer'][:1])\n"
STEPS = ["--run.steps", "3", "--backend", "inline"]


def make_project(folder: Path) -> None:
    """Model, data, reward, chat template, and a configuration that names them as seen from ``folder``."""
    model = load_model(ModelConfig(**MODEL))
    save_pretrained(model, model.state_dict(), folder / "models" / "base", load_tokenizer(MODEL["tokenizer"]))
    config = tiny(GRPOConfig, folder, save={"every": 1, "keep": 0})
    data = Path(str(config.data.train))
    shutil.copy(data, folder / "held-out.jsonl")
    (folder / "rewards.py").write_text(REWARD)
    (folder / "template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    values: dict[str, Any] = config_to_dict(config)
    values["run"]["dir"] = "runs"
    values["model"] |= {"path": "models/base", "config": {}, "tokenizer": "", "lora": {"rank": 2}}
    values["data"] |= {"train": data.name, "eval": "held-out.jsonl", "chat_template": "template.jinja"}
    values["reward"]["name"] = "rewards.py:score"
    (folder / "run.yaml").write_text(yaml.safe_dump(values))


def test_a_run_and_its_files_are_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old"
    old.mkdir()
    make_project(old)
    monkeypatch.chdir(old)
    assert main(["train", "grpo", "--config", "run.yaml", "--backend", "inline"]) == 0
    new = old.rename(tmp_path / "new")
    monkeypatch.chdir(tmp_path)
    run = new / "runs" / "run"
    capsys.readouterr()

    assert main(["runs", str(run)]) == 0
    said = capsys.readouterr().out
    assert f"model path: {run / 'model'}\n" in said
    assert "model.path models/base, data.train copy.jsonl, reward.name rewards.py:score" in said
    assert main(["eval", f"{run}@1", "--backend", "inline"]) == 0
    assert f"\nmoved from {old} to {new}: data.chat_template, reward.name, data.eval\n" in capsys.readouterr().err
    capsys.readouterr()
    assert main(["sample", f"{run}@1", "--prompt", "12=", "--prompt", "34="]) == 0
    answers, said = capsys.readouterr()
    heads = ["--- prompt 1, completion 1", "--- prompt 2, completion 1"]
    assert answers.splitlines()[::2] == heads
    assert answers.count("\n") == 4, "one completion of each prompt"
    assert f"moved from {old} to {new}: data.chat_template\n" in said
    assert main(["export", f"{run}@1", "--to", str(tmp_path / "out")]) == 0
    assert f"moved from {old} to {new}: model.path, data.chat_template\n" in capsys.readouterr().err
    adapters = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert adapters["base_model_name_or_path"] == str(new / "models" / "base")
    assert "`models/base`" in (card := (tmp_path / "out" / "README.md").read_text()), "no path of this machine"
    assert "base_model:" not in card

    # A later change of the data is said beside the move, and a resume names what is gone.
    (new / "copy.jsonl").write_text((new / "copy.jsonl").read_text().replace("}", " }"))
    (new / "rewards.py").rename(new / "graders.py")
    assert main(["train", "grpo", "--resume", str(run), *STEPS]) == 2
    assert f"reward.name: the file of the run is gone; it was looked for at {old}/" in capsys.readouterr().err
    reward = ["--reward.name", f"{new}/graders.py:score"]
    assert main(["train", "grpo", "--resume", str(run), "--dry-run", *reward, *STEPS]) == 0
    assert f"train: {new / 'copy.jsonl'}" in (plan := capsys.readouterr().out)
    assert f"note         moved from {old} to {new}: model.path, data.chat_template, data.train, data.eval\n" in plan
    assert main(["train", "grpo", "--resume", str(run), *reward, *STEPS]) == 0
    log = (run / "logs" / "controller.log").read_text()
    assert f"moved from {old} to {new}: model.path, data.chat_template, data.train, data.eval\n" in log
    assert f"data.train: {new / 'copy.jsonl'} has changed since the run began: it had " in log
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["path"] == str(new / "models" / "base")
    assert yaml.safe_load((run / "config.1.yaml").read_text())["model"]["path"] == str(old / "models" / "base")

    assert json.loads((run / "summary.json").read_text())["task"] == "copy.jsonl"

    # Without its base, a checkpoint of adapters says which key gives it.
    (new / "models").rename(tmp_path / "elsewhere")
    for command in (["export", f"{run}@1"], ["export", f"{run}@1", "--merge"]):
        assert main([*command, "--to", str(tmp_path / "again")]) == 2
        assert "model.path: the file of the run is gone" in capsys.readouterr().err
        assert main([*command, "--to", str(tmp_path / "again"), "--model.path", str(tmp_path / "elsewhere/base")]) == 0
        shutil.rmtree(tmp_path / "again")
    assert main(["export", str(run), "--to", "again", "--model.pth", "x"]) == 2
    assert "did you mean model.path?" in capsys.readouterr().err
