"""``--dry-run --measure`` times a micro-step and a decoding step of every recipe, and leaves nothing on the disk."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from podium.cli import main
from podium_dryrun.times import _Times
from tests.integration.training import MODEL, write_copy_task

RECIPES = ("grpo", "ppo", "sft", "dpo", "rm")


def write_settings(folder: Path, recipe: str, **sections: Any) -> Path:
    """A configuration of the copy task, with pairs for the recipes that learn from them."""
    data = write_copy_task(folder)
    if recipe in ("dpo", "rm"):
        rows = [json.loads(line) for line in data.read_text().splitlines()]
        pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "0"} for row in rows]
        data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    values: dict[str, Any] = {
        "run": {"dir": str(folder / "runs"), "steps": 20},
        "model": MODEL,
        "data": {"train": str(data), "holdout": 0.2},
        "parallel": {"micro_batch_tokens": 40},
        "eval": {"items": 4, "every": 10},
    }
    if recipe in ("grpo", "ppo"):
        values |= {"reward": {"name": "exact"}, "sampling": {"max_new_tokens": 5}, "batch": {"prompts": 16}}
    else:
        values["batch"] = {"examples": 40}
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump({**values, **sections}))
    return path


def list_files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*"))


@pytest.mark.everyday("grpo", "sft")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_and_the_run_are_timed_and_nothing_is_left(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    settings = write_settings(tmp_path, recipe)
    command = ["train", recipe, "--config", str(settings), "--backend", "inline", "--dry-run"]
    assert main(command) == 0  # the run itself would find the tokens that this one writes
    assert "# time" not in capsys.readouterr().out
    before = list_files(tmp_path)
    assert main([*command, "--measure"]) == 0
    plan, _, times = capsys.readouterr().out.partition("# time\n")
    assert "# memory" in plan
    lines = dict(re.findall(r"^(.{12}) (.*)$", times, re.MULTILINE))
    lines = {name.strip(): text for name, text in lines.items()}
    assert re.search(r"rows of \d+ tokens on 1 rank: .*update .*; optimizer step", lines["micro-step"])
    assert lines["a step"].startswith("about ") and "to learn" in lines["a step"]
    assert re.match(r"about .*: 20 steps, and 3 evaluations of about", lines["the run"])
    assert ("decoding" in lines) == (recipe in ("grpo", "ppo")) == ("to generate" in lines["a step"])
    assert "their mean" in lines["assumed"]
    assert list_files(tmp_path) == before


def test_measure_alone_is_refused_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "sft", "--config", str(write_settings(tmp_path, "sft")), "--measure"]) == 2
    assert "write --dry-run --measure, or leave it out to train" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_what_cannot_be_timed_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sessions take what their tools take. A loss that reads a column of its own fails on rows that lack it."""
    (tmp_path / "game.py").write_text("async def live(task, client):\n    return 1.0\n")
    (tmp_path / "own.py").write_text(
        "from podium.algorithms import LossDeclaration\n\n"
        "@LossDeclaration(columns=('cleverness',))\n"
        "def loss(inputs, config):\n    return inputs.columns['cleverness']\n"
    )
    template = "{% for m in messages %}{{ m.content }}={% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    settings = write_settings(tmp_path, "grpo", environment={"name": f"{tmp_path / 'game.py'}:live"}, reward={})
    command = ["train", "grpo", "--config", str(settings), "--backend", "inline", "--dry-run", "--measure"]
    assert main([*command, "--data.chat_template", str(tmp_path / "chat.jinja")]) == 0
    times = capsys.readouterr().out.partition("# time\n")[2]
    assert re.search(r"^not timed +sessions of .*live, whose turns and tools only a run shows$", times, re.MULTILINE)
    assert re.search(r"^a step +at least .*: .* to learn$", times, re.MULTILINE)


def test_without_the_package_the_option_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podium.cli.train.find_installed", lambda *_: None)
    command = ["train", "grpo", "--config", str(write_settings(tmp_path, "grpo")), "--dry-run"]
    assert main(command) == 2
    shown = capsys.readouterr()
    assert "entry point group podium.dry_run" in shown.err and "pip install ./plugins/podium-NAME" in shown.err
    assert not shown.out


def test_the_time_of_a_run_follows_from_what_was_measured() -> None:
    times = _Times(passes={"update": 2.0, "values": 1.0}, optimizer=0.5, tokens=100)
    times.sequences, times.prefill, times.decoding = 32, 1.0, 0.1
    assert times.generate(rows=64, sampled=10) == pytest.approx(2 * (1.0 + 10 * 0.1))
