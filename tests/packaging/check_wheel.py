"""Use the installed wheel as a stranger would: outside the repository, without extras.

`make test-wheel` runs this file. It runs in an environment that
holds the wheel and its own dependencies and nothing else, so it does not use pytest.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import metadata, requires
from importlib.util import find_spec
from pathlib import Path

MOST_DEPENDENCIES = 13
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
SETTINGS = {
    "run.name": "wheel",
    "run.steps": "2",
    "model.config": json.dumps(MODEL),
    "model.tokenizer": "chars:0123456789= ",
    "reward.name": "fraction",
    "batch.prompts": "4",
    "sampling.n": "2",
    "sampling.max_new_tokens": "3",
    "eval.items": "4",
}


def podium(folder: Path, *arguments: str, expected: int = 0) -> str:
    """Run the command line in ``folder`` and return what it printed; fail if its exit status is another."""
    done = subprocess.run(
        [sys.executable, "-m", "podium", *arguments], cwd=folder, capture_output=True, text=True, timeout=300
    )
    said = done.stdout + done.stderr
    assert done.returncode == expected, f"podium {' '.join(arguments)} ended with {done.returncode}:\n{said}"
    return said


def settings(changes: Mapping[str, str]) -> list[str]:
    """The words of a command line that train the smallest model, with some settings changed."""
    return [word for name, value in {**SETTINGS, **changes}.items() for word in (f"--{name}", value)]


def check_requirements(folder: Path) -> None:
    """The wheel needs few packages, and none of the extras is here."""
    core = [line for line in requires("podium") or () if "extra ==" not in line]
    assert len(core) <= MOST_DEPENDENCIES, f"{len(core)} core dependencies: {core}"
    for name in ("ray", "matplotlib", "plotext", "reasoning_gym", "math_verify", "pytest"):
        assert find_spec(name) is None, f"{name} is installed, so this environment does not test the core alone"


def check_page(folder: Path) -> None:
    """What a package index shows has links that lead somewhere from there, and the addresses of the project."""
    found = metadata("podium")
    text = str(found.json["description"])
    relative = re.findall(r"\]\((?!https:|#)[^)]*\)", text)
    assert "# Podium" in text and not relative, relative
    assert any(url.startswith("Homepage, https:") for url in found.get_all("Project-URL") or ())


def check_help(folder: Path) -> None:
    """Help, keys, backends and completion answer, by the command and by the module."""
    command = Path(sys.executable).with_name("podium")
    assert subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout.startswith(
        "podium "
    )
    assert "--optim.lr" in podium(folder, "completion", "bash")
    assert "did you mean optim.lr?" in podium(folder, "train", "grpo", "--learning_rate", "1e-6", expected=2)
    assert "train" in podium(folder, "--help")
    assert "--algorithm.advantage" in podium(folder, "train", "grpo", "--keys")
    assert "inline" in podium(folder, "backends")


def check_training(folder: Path) -> None:
    """A run trains on worker processes, its model answers, and the report says what draws the curve."""
    said = podium(folder, "train", "grpo", *settings({"data.train": "rows.jsonl"}))
    assert "entry point group podium.curves" in said, f"nothing says what the curve needs:\n{said}"
    assert (folder / "runs/wheel/summary.json").is_file()
    podium(folder, "sample", "runs/wheel", "--prompt", "12=")
    podium(folder, "view", "runs/wheel", "--export", "run.html")
    assert "class CurvesView" in (folder / "run.html").read_text(), "the wheel of podium-view lacks its page"


def check_extras(folder: Path) -> None:
    """What is not installed is named with its remedy before anything starts."""
    cases: list[tuple[str, dict[str, str], list[str]]] = [
        ("entry point group podium.tasks", {"data.train": "reasoning_gym:basic_arithmetic"}, []),
        ("entry point group podium.rewards", {"reward.name": "math"}, []),
        ("pip install ./plugins/podium-NAME", {}, ["--backend", "ray"]),
        ("entry point group podium.backends", {}, ["--backend", "another"]),
        ("entry point group podium.environments", {"environment.name": "another"}, []),
        ("entry point group podium.sessions", {"environment.name": "world.py:play"}, []),
        ("entry point group podium.trackers", {"run.trackers": "[wandb]"}, []),
        ("entry point group podium.engines", {"engine.name": "vllm"}, []),
    ]
    for remedy, changes, words in cases:
        values = {"run.name": "other", "data.train": "rows.jsonl", **changes}
        said = podium(folder, "train", "grpo", *settings(values), *words, expected=2)
        assert remedy in " ".join(said.split()), said


def main() -> None:
    checks: list[Callable[[Path], None]] = [check_requirements, check_page, check_help, check_training, check_extras]
    with tempfile.TemporaryDirectory(prefix="podium-wheel-") as name:
        folder = Path(name)
        rows = [{"prompt": f"{number:02d}=", "answer": f"{number:02d}"} for number in range(40)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for check in checks:
            check(folder)
            sys.stdout.write(f"{check.__name__}: ok\n")
    sys.stdout.write(f"the wheel passes {len(checks)} checks on Python {sys.version.partition(' ')[0]}\n")


if __name__ == "__main__":
    main()
