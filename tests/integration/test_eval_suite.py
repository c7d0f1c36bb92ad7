"""``podium eval --suite``: a harness asks the model that the command serves, and both end with it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from podium.cli import main
from podium.runs.files import step_name
from podium.runs.run_reader import RunRecord
from podium.trainer import GRPOConfig
from tests.integration.test_serve_lm_eval import LM_EVAL, needs_lm_eval
from tests.integration.training import MODEL, tiny, train

pytest.importorskip("uvicorn")

FAKE = """#!{python}
import json, os, sys, urllib.request
from pathlib import Path
words = dict(zip(sys.argv[1:], sys.argv[2:]))
where = dict(part.split("=", 1) for part in words["--model_args"].split(","))
if "--fail" in sys.argv: sys.exit(3)
assert Path(where["tokenizer"], "tokenizer_config.json").exists()
body = {{"model": where["model"], "prompt": "12=", "max_tokens": 2, "temperature": 0}}
head = {{"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
reply = urllib.request.urlopen(urllib.request.Request(where["base_url"], json.dumps(body).encode(), head))
text = json.load(reply)["choices"][0]["text"]
results = {{"results": {{words["--tasks"]: {{"length,none": len(text), "length_stderr,none": 0.5}}}}}}
Path(words["--output_path"], "results_1.json").write_text(json.dumps(results))
"""


def test_a_harness_asks_the_model_of_a_run_and_its_results_are_kept(
    finished_grpo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which a harness asks for any address but those of no_proxy
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "example.org")
    run = shutil.copytree(finished_grpo / "runs" / "run", tmp_path / "run")
    fake = tmp_path / "lm_eval"
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(0o755)
    words = ["eval", str(run), "--backend", "inline", "--suite", "lm-eval:copy", "--harness", str(fake)]
    assert main(words) == 0
    first = capsys.readouterr()
    out = first.out.splitlines()
    (kept,) = (run / "suites" / "lm-eval" / "copy").iterdir()
    assert kept.stem == step_name(RunRecord(run).step)
    assert out[0].split() == ["copy", "length", "2.0000", "±", "0.5000"]
    assert out[1] == str(kept)
    assert json.loads(kept.read_text())["results"] == {"copy": {"length": 2.0, "length_stderr": 0.5}}
    assert main([*words, "--", "--fail"]) != 0
    second = capsys.readouterr().err
    assert "lm-eval ended with status 3" in second
    names = [re.findall(r"model=(run-\w+),", err) for err in (first.err, second)]
    assert len(names[0]) == len(names[1]) == 1
    assert names[0] != names[1], "a harness that keeps answers by the model's name keeps none of another checkpoint"


@needs_lm_eval
@pytest.mark.exhaustive
@pytest.mark.slow
def test_lm_eval_itself_evaluates_a_task_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert LM_EVAL is not None
    longer = {"config": {**MODEL["config"], "max_position_embeddings": 256}, "tokenizer": MODEL["tokenizer"]}
    run = train(tiny(GRPOConfig, tmp_path, model=longer))
    rows = [{"question": f"{n:02d}=", "options": [f"{n:02d}", "77"], "answer": 0} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "choose.yaml").write_text(
        'task: choose\noutput_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: "{{options}}"\n'
        'doc_to_target: "{{answer}}"\nmetric_list:\n  - metric: acc\ndataset_path: json\ntest_split: train\n'
        f"dataset_kwargs:\n  data_files: {tmp_path / 'rows.jsonl'}\n"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    words = ["eval", str(run), "--backend", "inline", "--suite", "lm-eval:choose", "--harness", LM_EVAL]
    assert main([*words, "--", "--include_path", str(tmp_path)]) == 0
    kept = json.loads((run / "suites" / "lm-eval" / "choose" / "step-000002.json").read_text())
    assert 0 <= kept["results"]["choose"]["acc"] <= 1 and kept["results"]["choose"]["acc_stderr"] >= 0
    assert os.fspath(run) in capsys.readouterr().out
