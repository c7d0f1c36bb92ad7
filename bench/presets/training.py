"""The runs: a model with a wrong habit, and each preset and recipe from there.

The task is to copy three digits. The warm-up shows answers of which 70 % have the digits in reverse, so that the model
draws the right answer for three prompts in ten, and the wrong one more often. A policy that becomes more certain
without listening to rewards gets worse.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import time
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.peer import PeerError, peer_command, python_of, start_peer
from podium.algorithms import LOSSES
from podium.cli import main
from podium.cli.presets import list_presets, read_preset
from podium.runs.config import GRPOConfig, PPOConfig
from podium.runs.recipes import find_recipe, list_recipes

SEEDS: Final = (0, 1, 2, 3, 4)
TRL: Final = "trl"
RIGHT: Final = 0.3
"""The share of right answers in the demonstrations of the warm-up."""
STEPS: Final = 40
SETTINGS: Final[Mapping[str, Any]] = {
    "run": {"steps": STEPS},
    "optim": {"lr": 2e-4},
    "eval": {"items": 200, "every": 5, "metric": "accuracy"},
    "save": {"model": False, "minutes": 0.0},
    "placement": {"cpus": 1},
}
"""The settings of all runs."""
DRAWN: Final[Mapping[str, Any]] = {
    "batch": {"prompts": 16},
    "sampling": {"n": 8, "max_new_tokens": 4},
    "algorithm": {"minibatches": 4},
    "reward": {"name": "exact", "processes": 1},
    "eval": {"temperature": {"temperature": 1.0, "n": 4}},
}
"""Those of the runs that sample. With several updates of each batch the policy leaves the one that sampled, and losses
clip."""
READ: Final[Mapping[str, Any]] = {"batch": {"examples": 16}, "sampling": {"max_new_tokens": 4}}
"""Those of the runs that learn from examples or pairs."""
PARTICULAR: Final[Mapping[str, Mapping[str, Any]]] = {
    "ppo": {"critic": {"lr": 1e-3}},
    "sft": {"eval": DRAWN["eval"]},
}
"""Those of single recipes. The critic of PPO begins with a head of zeros and takes larger steps than the policy."""
MODEL: Final = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
WARM_UP: Final[Mapping[str, Any]] = {
    "run": {"seed": 0},
    "model": {"config": MODEL, "tokenizer": "chars:0123456789= ", "seed": 0},
    "sampling": {"max_new_tokens": 4},
    "optim": {"lr": 2e-3, "warmup_steps": 10, "lr_schedule": "linear"},
    "batch": {"examples": 32},
    "eval": {"items": 0},
    "save": {"minutes": 0.0},
    "placement": {"cpus": 1},
}
WARM_UP_STEPS: Final = {"habit": 300, "teacher": 200}


@dataclass(frozen=True)
class Arm:
    """A preset of ``podium train grpo``, or another recipe of ``podium train``."""

    name: str
    recipe: str
    preset: str | None = None

    @property
    def samples(self) -> bool:
        """Whether the arm is scored by completions that it draws for held-out prompts, and learns from its own."""
        return issubclass(find_recipe(self.recipe).config, PPOConfig)


@dataclass(frozen=True)
class Run:
    """A run's scores on held-out rows by step, and what it cost.

    Attributes:
        points: Pairs of a step and the share of held-out prompts answered rightly, or of pairs told apart.
        seconds: From the start to the end.
        processor_s: Seconds of the processor, those of graders included.
    """

    arm: str
    seed: int
    points: list[tuple[int, float]]
    seconds: float
    processor_s: float

    @property
    def gain(self) -> float:
        """The last score less the first one."""
        return self.points[-1][1] - self.points[0][1]

    def as_json(self) -> dict[str, Any]:
        """The run as it is kept in the file of results."""
        return {**asdict(self), "seconds": round(self.seconds, 2), "processor_s": round(self.processor_s, 2)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Run:
        """A run from the file of results."""
        return cls(**{**values, "points": [(step, score) for step, score in values["points"]]})


def list_arms() -> dict[str, Arm]:
    """Return every preset, and every recipe that has no presets, by name. One that is added is among them at once."""
    presets = {name: Arm(name, "grpo", name) for name in list_presets()}
    return presets | {name: Arm(name, name) for name in list_recipes() if find_recipe(name).config is not GRPOConfig}


class Course:
    """Trains arms in ``folder``, from models that it warms up there once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)

    def train(self, arm: Arm, seed: int, **changes: Mapping[str, Any]) -> Run:
        """Train one seed of an arm by the command that users run. ``changes`` are sections that come before its own.

        Raises:
            SystemExit: The run failed.
        """
        self.warm_up()
        rows = "" if arm.samples else "examples-" if arm.recipe == "sft" else "pairs-"
        config = merge(
            SETTINGS,
            DRAWN if arm.samples else READ,
            {
                "run": {"seed": seed},
                "model": {"path": str(self.folder / "habit" / "model")},
                "data": {"train": self._data(f"{rows}train"), "eval": self._data(f"{rows}held_out")},
                **({"algorithm": {"options": {"teacher": self._teacher()}}} if _needs_teacher(arm) else {}),
            },
            PARTICULAR.get(arm.name, {}),
            changes,
        )
        began, before = time.monotonic(), _processor_s()
        run = self._podium(arm, f"{arm.name}-{seed}", config)
        seconds, processor_s = time.monotonic() - began, _processor_s() - before
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        points = [(line["step"], line["accuracy"]) for line in lines if line["kind"] == "eval"]
        return Run(arm.name, seed, points, seconds, processor_s)

    def train_trl(self, seed: int) -> Run | None:
        """Train TRL's GRPO on the same model, prompts and budget, with the paper's settings as the preset ``grpo`` has
        them. Returns None where `make bench-peers` has not installed TRL."""
        self.warm_up()
        python = python_of("trl")
        if python is None:
            return None
        preset = read_preset("grpo").settings
        arguments = {
            "model": str(self.folder / "habit" / "model"),
            "train": self._data("train"),
            "held_out": self._data("held_out"),
            "seed": seed,
            "steps": STEPS,
            "every": SETTINGS["eval"]["every"],
            "learning_rate": SETTINGS["optim"]["lr"],
            "prompts": DRAWN["batch"]["prompts"],
            "completions": DRAWN["sampling"]["n"],
            "new_tokens": DRAWN["sampling"]["max_new_tokens"],
            "minibatches": DRAWN["algorithm"]["minibatches"],
            "draws": DRAWN["eval"]["temperature"]["n"],
            "kl": preset["algorithm.kl_coef"],
            "clip": preset["algorithm.clip_low"],
        }
        try:
            with start_peer(
                peer_command(python, "trl_presets"), self.folder / "trl.log", environment={"OMP_NUM_THREADS": "1"}
            ) as peer:
                return Run.from_json({"arm": TRL, "seed": seed, **peer.call("train", **arguments)})
        except PeerError as error:
            raise SystemExit(f"TRL, seed {seed}: {error}") from error

    def warm_up(self) -> None:
        """Write the data and train the model with the habit and the teacher, unless they are there."""
        if all((self.folder / name / "model").exists() for name in WARM_UP_STEPS):
            return
        write_data(self.folder)
        for name, steps in WARM_UP_STEPS.items():
            data = {"train": self._data("habits" if name == "habit" else "examples-train"), "holdout": 0.0}
            self._podium(Arm("sft", "sft"), name, merge(WARM_UP, {"run": {"steps": steps}, "data": data}))

    def _data(self, name: str) -> str:
        return str(self.folder / f"{name}.jsonl")

    def _teacher(self) -> str:
        return str(self.folder / "teacher" / "model")

    def _podium(self, arm: Arm, name: str, config: Mapping[str, Any]) -> Path:
        run, path, log = (self.folder / f"{name}{ending}" for ending in ("", ".yaml", ".log"))
        shutil.rmtree(run, ignore_errors=True)
        path.write_text(json.dumps(merge(config, {"run": {"dir": str(self.folder), "name": name}})))  # JSON is YAML
        words = ["train", arm.recipe, "--config", str(path), "--backend", "inline"]
        with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
            status = main([*words, *(("--recipe", arm.preset) if arm.preset else ())])
        if status:
            raise SystemExit(f"{name} ended with status {status}; {log} ends with:\n{log.read_text()[-1000:]}")
        return run


def write_data(folder: Path) -> None:
    """Write prompts with answers, pairs of a right and a wrong answer, and the demonstrations of the habit."""
    chance = random.Random(0)
    numbers = [text for text in (f"{number:03d}" for number in range(1000)) if text != text[::-1]]
    chance.shuffle(numbers)
    held_out, train = numbers[:200], numbers[200:]
    habits = [(text, text if chance.random() < RIGHT else text[::-1]) for text in train * 8]

    def write(name: str, rows: list[dict[str, str]]) -> None:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    for name, texts in (("held_out", held_out), ("train", train)):
        answers = [{"prompt": f"{text} =", "answer": text} for text in texts]
        write(name, answers)
        write(f"examples-{name}", answers)
        write(f"pairs-{name}", [{"prompt": f"{text} =", "chosen": text, "rejected": text[::-1]} for text in texts])
    write("habits", [{"prompt": f"{text} =", "answer": answer} for text, answer in habits])


def merge(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of settings, of which later ones come before earlier ones key by key."""
    sections: dict[str, Any] = {}
    for part in parts:
        for name, section in part.items():
            sections[name] = {**sections.get(name, {}), **section}
    return sections


def _needs_teacher(arm: Arm) -> bool:
    loss = read_preset(arm.preset).settings.get("algorithm.loss") if arm.preset else None
    return isinstance(loss, str) and LOSSES.declaration(loss).needs_teacher


def _processor_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
