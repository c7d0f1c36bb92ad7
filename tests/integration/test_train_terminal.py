"""What a person sees who types a command into a terminal, and what the log keeps of it."""

from __future__ import annotations

from pathlib import Path

from podium.trainer import GRPOConfig, config_to_yaml
from tests.integration.training import tiny
from tests.terminal import in_pty


def test_a_run_in_a_terminal_leaves_its_rows_and_its_report_and_no_bar(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(config_to_yaml(tiny(GRPOConfig, tmp_path, save={"model": False})))
    lines = in_pty("-m", "podium", "train", "grpo", "--config", str(file), width=140)
    assert lines[0].startswith("podium grpo  run ")
    assert not any("━" in line for line in lines), "a bar stands in what is left"
    assert not any(line.startswith(("importing", "reading", "tokenizing", "loading")) for line in lines)
    for text in ("held-out reward", "  trace  "):
        assert any(text in line for line in lines)
    log = (tmp_path / "runs" / "run" / "logs" / "controller.log").read_text()
    assert "podium train grpo --config" in log.splitlines()[0]
    for text in ("reading ", "tokenizing ", "loading a new model", "step", "held-out reward", "trace.json"):
        assert text in log
    rows = [line for line in lines if line.split()[:1] == ["1"]]
    assert len(rows) == 1
    assert rows[0] in log
