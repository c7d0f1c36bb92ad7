"""Which files of Podium a step of GRPO enters: ``python -m bench.entered``.

A run of three steps on one process, where every worker is an object of the script. The files are those whose functions
are called between the ends of the first step and of the last one, so neither imports nor the start are among them.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import podium
from podium.telemetry import Event, StepFinished, subscribe
from podium.trainer import GRPOConfig, PPOTrainer, build_config

__all__ = ["count_calls", "main"]

ROOT = Path(podium.__file__).parents[2]
SOURCES = tuple(f"{folder}/" for folder in (ROOT / "src" / "podium", *ROOT.glob("plugins/*/src")))


def count_calls(steps: int = 3) -> Counter[tuple[str, str]]:
    """Return how often each function was called, by its file below ``podium``, or that of a package of its own, and its
    name."""
    calls: Counter[tuple[str, str]] = Counter()
    counting = False

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if counting and event == "call" and (source := next(filter(code.co_filename.startswith, SOURCES), None)):
            calls[code.co_filename.removeprefix(source), code.co_qualname] += 1

    def hear(event: Event) -> None:
        nonlocal counting
        if isinstance(event, StepFinished):
            counting = event.step < steps

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "sums.jsonl"
        data.write_text("".join(f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(8) for b in range(8)))
        config = build_config(
            GRPOConfig,
            {
                "model": {
                    "tokenizer": "chars:0123456789+=",
                    "config": {
                        "model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
                        "num_attention_heads": 2, "num_key_value_heads": 1,
                    },
                },
                "data": {"train": str(data)},
                "batch": {"prompts": 4},
                "sampling": {"n": 4, "max_new_tokens": 3},
                "eval": {"every": 0, "items": 0},
                "save": {"every": 0},
                "run": {"steps": steps, "dir": folder, "name": "run"},
            },
        )  # fmt: skip
        unsubscribe = subscribe(hear)
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            PPOTrainer(config, cluster="inline", show=False).fit()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            unsubscribe()
    return calls


def main() -> None:
    """Print the files, those that are entered by the fewest functions first."""
    calls = count_calls()
    files: dict[str, list[str]] = {}
    for (file, function), _ in sorted(calls.items()):
        files.setdefault(file, []).append(function)
    for file, functions in sorted(files.items(), key=lambda entry: (len(entry[1]), entry[0])):
        path = next(path for source in SOURCES if (path := Path(source) / file).is_file())
        lines = len(path.read_text(encoding="utf-8").splitlines())
        print(f"{file:50} {lines:4} lines  {', '.join(functions)}")  # noqa: T201 - a command
    print(f"{len(files)} files")  # noqa: T201 - a command


if __name__ == "__main__":
    main()
