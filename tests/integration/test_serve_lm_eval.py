"""lm-eval, asked through ``podium serve``, measures what it measures with the model in its own process."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_serve_cli import model, serving

__all__ = ["model"]

_APART = Path(__file__).parents[2] / ".venvs" / "lm-eval" / "bin" / "lm_eval"
LM_EVAL = str(_APART) if _APART.exists() else shutil.which("lm_eval")

_INSTALL = "python -m venv .venvs/lm-eval; .venvs/lm-eval/bin/pip install 'lm-eval[api]' transformers accelerate"
needs_lm_eval = pytest.mark.skipif(LM_EVAL is None, reason=f"lm-eval is not installed: {_INSTALL}")
pytestmark = needs_lm_eval

TASKS = {
    "choices": """
task: choices
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{options}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "texts": """
task: texts
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - metric: word_perplexity
""",
    "answers": """
task: answers
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{first}}"
generation_kwargs:
  until: ["e"]
  max_gen_toks: 12
  do_sample: false
metric_list:
  - metric: exact_match
""",
}
DATA = """dataset_path: json
dataset_kwargs:
  data_files: {rows}
test_split: train
"""


def measured(folder: Path, *words: str) -> dict[str, Any]:
    """The results of lm-eval, and of each task the answers."""
    env = {**os.environ, "OPENAI_API_KEY": "secret", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    assert LM_EVAL is not None
    command = [LM_EVAL, "run", "--tasks", ",".join(TASKS), "--include_path", str(folder / "tasks")]
    output = folder / words[1]
    done = subprocess.run(
        [*command, "--output_path", str(output), "--log_samples", *words],
        env=env,
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (found,) = output.rglob("results_*.json")
    scores: dict[str, Any] = json.loads(found.read_text())["results"]
    rows = [path.read_text() for task in TASKS for path in output.rglob(f"samples_{task}_*.jsonl")]
    return {"scores": scores, "samples": [json.loads(line) for text in rows for line in text.splitlines()]}


def alike(mine: Any, theirs: Any) -> bool:
    """Whether answers are equal; numbers, which lm-eval writes as text, up to rounding."""
    if isinstance(mine, list):
        return len(mine) == len(theirs) and all(map(alike, mine, theirs))
    try:
        return float(mine) == pytest.approx(float(theirs), abs=1e-4)
    except ValueError:
        return mine == theirs


@pytest.mark.slow
def test_the_scores_are_those_of_its_own_backend(model: Path, tmp_path: Path) -> None:
    check_scores(model, tmp_path, count=40)


def check_scores(model: Path, folder: Path, count: int) -> None:
    """Check that lm-eval measures the same of a model that is served and in its own process, on ``count`` rows."""
    chance = random.Random(0)
    rows = list[dict[str, Any]]()
    for _ in range(count):
        question = f"{chance.randrange(100)} + {chance.randrange(100)} ="
        options = [f" {chance.randrange(200)}" for _ in range(4)]
        rows.append({"question": question, "options": options, "answer": chance.randrange(4), "first": "x"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks").mkdir()
    for name, text in TASKS.items():
        (folder / "tasks" / f"{name}.yaml").write_text(text + DATA.format(rows=folder / "rows.jsonl"))
    own = measured(folder, "--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--device", "cpu")
    with serving(str(model)) as served:
        where = f"model={model.name},base_url={served.url}/v1/completions,num_concurrent=4,max_retries=1"
        where += f",tokenizer_backend=huggingface,tokenizer={model},tokenized_requests=True"
        asked = measured(folder, "--model", "local-completions", "--model_args", where)
    for task in TASKS:
        for metric, value in own["scores"][task].items():
            if isinstance(value, float):
                assert asked["scores"][task][metric] == pytest.approx(value, rel=1e-5), (task, metric)
    assert len(own["samples"]) == len(asked["samples"]) == 3 * len(rows)
    for mine, theirs in zip(own["samples"], asked["samples"], strict=True):
        assert mine["doc"] == theirs["doc"]
        assert alike(mine["filtered_resps"], theirs["filtered_resps"]), (mine, theirs)
