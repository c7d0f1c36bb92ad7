"""A run with secrets in its configuration: no file, page or command of it shows them, and a resume asks for them."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podium.cli import main
from podium.errors import ConfigError
from podium.secrecy import MASK
from podium.trainer import GRPOConfig
from podium_dryrun.plan import describe_plan
from podium_view.export import export_page
from podium_view.run import Run
from tests.integration.secret_world import KEY
from tests.integration.test_environments import TEMPLATE
from tests.integration.training import tiny, train

WORLD = Path(__file__).with_name("secret_world.py")
HIDDEN = "hunter2-of-the-judge"
VARIABLES = {
    "PODIUM_SECRET_ENVIRONMENT_OPTIONS_API_KEY": KEY,
    "PODIUM_SECRET_ENVIRONMENT_OPTIONS_JUDGE_URL": f"https://me:{HIDDEN}@judge.example/v1",
}


def config_of(folder: Path, steps: int, **run: Any) -> GRPOConfig:
    folder.mkdir(exist_ok=True)
    (folder / "chat.jinja").write_text(TEMPLATE)
    options = {"api_key": KEY, "judge": {"url": f"https://me:{HIDDEN}@judge.example/v1"}}
    return tiny(
        GRPOConfig,
        folder,
        environment={"name": f"{WORLD}:judged", "options": options},
        data={"chat_template": str(folder / "chat.jinja")},
        reward={"name": "exact"},
        run={"dir": str(folder / "runs"), "name": "run", "steps": steps, "trackers": ["tensorboard"], **run},
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.orig_argv", ["python", "train.py", "--environment.options.api_key", KEY, f"--x={HIDDEN}"])
        return train(config_of(tmp_path_factory.mktemp("secrets"), 1))


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def test_no_file_of_the_run_has_it(run: Path) -> None:
    assert [path for path in files(run) if KEY.encode() in path.read_bytes()] == []
    assert [path for path in files(run) if HIDDEN.encode() in path.read_bytes()] == []
    text = (run / "config.yaml").read_text()
    assert f"api_key: {MASK}" in text and f"https://me:{MASK}@judge.example/v1" in text
    first = (run / "logs" / "controller.log").read_text().splitlines()[0]
    assert f"--environment.options.api_key '{MASK}' '--x={MASK}'" in first
    assert any((run / "tensorboard").iterdir())


def test_no_page_report_or_command_has_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [json.dumps(Run(run, "run").answer("settings"))]
    page = export_page([Run(run, "run")])
    packed = re.search(r'"answers": "([^"]+)"', page)
    assert packed is not None
    shown += [page, gzip.decompress(base64.b64decode(packed[1])).decode()]
    assert MASK in shown[0] and MASK in shown[-1]
    assert main(["runs", str(run)]) == 0
    assert main(["changes", str(run), str(run)]) in (0, 2)
    assert main(["export", str(run), "--to", str(tmp_path / "model")]) in (0, 2)
    shown += [path.read_text(errors="replace") for path in files(tmp_path)]
    shown.append(describe_plan(config_of(tmp_path / "plan", 1), "inline", {}))
    out, err = capsys.readouterr()
    assert not [text for text in (*shown, out, err) if KEY in text or HIDDEN in text]


def test_a_resume_asks_for_it_by_name_and_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(config_of(tmp_path, 1))
    command = ["train", "grpo", "--resume", str(run), "--run.steps", "2", "--backend", "inline"]
    assert main(command) == 2
    said = capsys.readouterr().err
    for variable in VARIABLES:
        assert variable in said
    assert "--environment.options.api_key" in said
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert main(command) == 0
    assert [path for path in files(run) if KEY.encode() in path.read_bytes()] == []


def test_a_resume_of_the_same_settings_is_no_change(run: Path, tmp_path: Path) -> None:
    train(config_of(tmp_path, 1))
    again = train(config_of(tmp_path, 1, resume="auto"))
    assert not (again / "config.1.yaml").exists()


def test_another_key_in_a_run_that_goes_on_is_found_by_its_environment(tmp_path: Path) -> None:
    config = config_of(tmp_path, 1)
    with pytest.raises(ConfigError, match="api_key"):
        tiny(GRPOConfig, tmp_path, environment={"name": "x:y", "api_key": KEY})
    assert config.environment.options["api_key"] == KEY
