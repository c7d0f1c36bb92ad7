"""A run in a notebook prints into one output of its cell, which is updated while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.training import MODEL, write_copy_task

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

CELLS = (
    """
from podium import PPOTrainer
from podium.trainer import GRPOConfig

def reward(completion, row):
    return float(completion.strip() == row["answer"])

def train(name):
    run = {"name": name, "steps": 2}
    batch, sampling, placement = {"prompts": 2}, {"n": 2, "max_new_tokens": 2}, {"cpus": 1}
    config = GRPOConfig(
        model=MODEL, data={"train": "copy.jsonl"}, run=run, batch=batch, sampling=sampling, placement=placement,
        eval={"items": 4},
    )
    return PPOTrainer(config, reward=reward, cluster="inline").fit()
""".replace("MODEL", repr(MODEL)),
    "first = train('first')",
    "print(first.steps, train('second').steps)",
)


class Client(nbclient.NotebookClient):
    """Keeps all texts that cells show, also those that a later one replaces."""

    shown: list[str]

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] in ("display_data", "update_display_data"):
            self.shown.append(msg["content"]["data"]["text/plain"])
        return super().process_message(msg, cell, cell_index)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_each_run_has_one_output_with_one_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_copy_task(tmp_path)
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # of libraries in the kernel
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = Client(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.shown = []
    client.execute()
    imports, first, second = (cell.outputs for cell in notebook.cells)
    assert [output.text for output in imports] == ["podium: importing torch and transformers\n"]
    assert [output.output_type for output in first] == ["display_data"]
    assert [output.output_type for output in second] == ["display_data", "stream"]
    assert second[1].text == "2 2\n"
    for name, (output, *_) in (("first", first), ("second", second)):
        text = output.data["text/plain"]
        assert text.count("held-out accuracy") == text.count("grpo: copy.jsonl") == 1
        assert f"runs/{name}/model" in text
        assert "━" not in text, "the bar stays"
        log = (tmp_path / "runs" / name / "logs" / "controller.log").read_text()
        assert log.count("held-out accuracy") == log.count("grpo: copy.jsonl") == 1
    assert any("━" in text and "0/2" in text for text in client.shown)
    assert "\n\n\n" not in first[0].data["text/plain"]


def test_the_output_keeps_the_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update sends all of them to the browser."""
    import IPython.display

    from podium.telemetry.sinks.notebook import CellOutput

    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            shown.append(data["text/plain"])

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        shown.append(data["text/plain"])
        return Handle()

    monkeypatch.setattr(IPython.display, "display", display)
    output = CellOutput()
    output.write("a line\nand a part")
    output.flush()
    output.flush()
    output.write("".join(f" {number}\n" for number in range(1000)))
    output.flush()
    assert shown[0] == "a line\nand a part"
    first, *lines = shown[1].splitlines()
    assert first == "(501 earlier lines are in logs/controller.log)"
    assert (len(lines), lines[0], lines[-1]) == (500, " 500", " 999")
    assert len(shown) == 2
