"""A run of two steps, from the command to its end, beside the imports that it cannot do without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.context import Context
from bench.measure import Row, Subjects, alternate, compare

__all__ = ["import_alone", "two_steps"]

MODEL = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
SETTINGS = {
    **{"run.steps": 2, "model.config": json.dumps(MODEL), "model.tokenizer": "chars:0123456789="},
    **{"reward.name": "fraction", "reward.processes": 1, "sampling.max_new_tokens": 3, "sampling.n": 4},
    **{"batch.prompts": 4, "data.holdout": 0.2, "eval.items": 4, "save.model": "false"},
}
CLASSES = "import torch, transformers; from transformers import AutoModelForCausalLM as M; M.from_config"


def two_steps(context: Context) -> Iterator[Row]:
    """``podium train grpo`` of a model of 10,000 parameters on ``local``: its time is that of imports."""
    with tempfile.TemporaryDirectory(prefix="podium-bench-") as folder:
        data = Path(folder, "copy.jsonl")
        data.write_text("".join(json.dumps({"prompt": f"{n:02d}=", "answer": f"{n:02d}"}) + "\n" for n in range(60)))
        settings = {**SETTINGS, "data.train": data, "run.dir": Path(folder, "runs")}
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        subjects: Subjects = {
            "podium": partial(process_s, "-m", "podium", "train", "grpo", *words),
            "classes": partial(process_s, "-c", CLASSES),
            "transformers": partial(process_s, "-c", "import transformers"),
        }
        floor = (
            "classes: importing torch and the base of all model classes, which no process with a model can do without"
        )
        yield compare(
            "two_steps_local", alternate(subjects, repetitions=context.repetitions(5, 2)), unit="s", floor=floor
        )


def import_alone(context: Context) -> Iterator[Row]:
    """``import podium`` in a fresh interpreter, beside an interpreter that imports nothing."""
    subjects: Subjects = {
        "podium": partial(process_s, "-c", "import podium"),
        "python": partial(process_s, "-c", ""),
    }
    figures = alternate(subjects, repetitions=context.repetitions(9, 3))
    yield compare("import_podium", figures, unit="ms", scale=1e3, floor="python: the interpreter's own start")


def process_s(*arguments: str) -> float:
    """Seconds of a Python process from its start to its end."""
    started = time.perf_counter()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *arguments], check=True, env=env, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started
