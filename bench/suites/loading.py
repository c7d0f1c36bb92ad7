"""From a directory of a model with the sizes of SmolLM2-135M to its weights, and to the end of a first step.

- load: Podium's load_model beside transformers' from_pretrained, in a process that has imported both. Every weight is
  read once, because either may map its files and read nothing. `read` reads the same bytes of the file.
- first_step: from the start of a process to the end of its first GRPO step, beside TRL's trainer. `parts` is the sum of
  what neither can do without, each measured alone: importing the base of all model classes, reading the file, and the
  matrix products of the step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bench.context import Context
from bench.floors import step_rate
from bench.measure import Row, Subjects, alternate, compare
from bench.suites.grpo import Turns, podium_trainer, trl_trainer
from bench.suites.training_start import CLASSES, process_s
from bench.workload import SHAPES, StepLoad
from podium.models import ModelConfig, load_model

WEIGHTS = "model.safetensors"
LOAD = StepLoad(shape="135m", prompts=4, completions=4, new_tokens=32)


@contextmanager
def model_directory(shape: str) -> Iterator[Path]:
    """A directory of a model of this shape with random weights, as transformers writes it."""
    with tempfile.TemporaryDirectory(prefix="podium-bench-") as folder:
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SHAPES[shape].config())).save_pretrained(folder)
        yield Path(folder)


def load(context: Context) -> Iterator[Row]:
    """Seconds until a model's weights are in memory; its file is in the kernel's cache."""
    with model_directory("1m" if context.quick else "135m") as folder:
        settings: dict[str, Any] = {"dtype": torch.float32}
        subjects: Subjects = {
            "podium": partial(weights_s, lambda: load_model(ModelConfig(path=str(folder), tokenizer="chars:01"))),
            "transformers": partial(weights_s, lambda: AutoModelForCausalLM.from_pretrained(folder, **settings)),
            "read": partial(read_s, folder / WEIGHTS),
        }
        figures = alternate(subjects, repetitions=context.repetitions(7))
    name = "load_1m" if context.quick else "load_135m"
    yield compare(name, figures, unit="s", floor="read: the file's bytes into memory, each looked at once")


def weights_s(make: Callable[[], torch.nn.Module]) -> float:
    """Seconds in which a model is made and each of its weights is read once."""
    started = time.perf_counter()
    model = make()
    for weight in model.parameters():
        weight.detach().view(torch.int32).max()
    return time.perf_counter() - started


def read_s(path: Path) -> float:
    """Seconds in which a file is read into fresh memory, and each of its words is read there once."""
    started = time.perf_counter()
    np.fromfile(path, dtype=np.int32, count=path.stat().st_size // 4).max()
    return time.perf_counter() - started


def first_step(context: Context) -> Iterator[Row]:
    """Seconds of a process until its first step has ended. Files and libraries are in the kernel's cache."""
    load = replace(LOAD, shape="1m") if context.quick else LOAD
    python = context.peer_python("trl")
    with model_directory(load.shape) as folder:
        load = replace(load, path=str(folder))
        subjects: Subjects = {"podium": partial(first_s, lambda: podium_trainer(context, load, 1))}
        if python is not None:
            subjects["trl"] = partial(first_s, lambda: trl_trainer(context, load, python, 1, threads=None))
        subjects["parts"] = partial(parts_s, load, folder)
        figures = alternate(subjects, repetitions=context.repetitions(3, 1), warmups=0)
    floor = "parts: importing the base of all model classes, reading the file, and the step's matrix products"
    yield compare(f"first_step_{load.shape}", figures, unit="s", floor=floor)


def first_s(start: Callable[[], Any]) -> float:
    """Seconds from the start of a trainer's process to the end of its first step; its end does not count."""
    started = time.perf_counter()
    with start() as trainer:
        assert isinstance(trainer, Turns)
        trainer.tokens_per_s()
        return time.perf_counter() - started


def parts_s(load: StepLoad, folder: Path) -> float:
    """The parts of a first step that nobody can do without, one after the other."""
    return process_s("-c", CLASSES) + read_s(folder / WEIGHTS) + load.tokens / step_rate(load)
