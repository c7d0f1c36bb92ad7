"""Settings of a run, and the moments at which it is ended, from a seed."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final

from bench.golden import MODEL

__all__ = ["Case", "End", "draw_case"]

GROUP_ADVANTAGES: Final = (
    *("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"),
    *("opo", "gpg", "maxrl", "pass_at_k", "grpo_passk", "gdpo", "otb", "remax"),
)
CRITIC_ADVANTAGES: Final = ("gae", "gae", "gae_turns")
LOSSES: Final = ("ppo_clip", "ppo_clip", "gspo", "cispo", "reinforce", "gmpo", "sapo", "clip_cov", "kl_cov")
LOSSES_OF_GENERATORS: Final = ("dppo_tv", "dppo_kl", "dro")  # whose ratio is to the generator: without correction
ADVANTAGES_OF_GRADES: Final = ("pass_at_k", "grpo_passk", "gdpo", "maxrl")  # which take no KL in the reward
CORRECTIONS: Final = ("none", "truncate", "bypass", "icepop", "sequence_mask", "geometric", "m2po", "high_entropy")
TEMPLATE: Final = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
SCORER: Final = """
def by_letters(completion, row):
    return sum(map(ord, completion)) % 7 / 7

def sometimes(completion, row):
    return None if int(row["answer"]) % 5 == 0 else float(completion[:1] < "5")
"""
Settings = dict[str, Any]


@dataclass(frozen=True)
class End:
    """What ends a run: after a step (``stop``, by SIGTERM), or at one of its moments (``kill``, by SIGKILL).

    Attributes:
        share: Where in the run, from 0 to 1: of its steps, or of its moments.
    """

    kind: str
    share: float


@dataclass(frozen=True)
class Case:
    """A run and its ends.

    Attributes:
        exact: Two undisturbed runs are the same to the bit.
        replays: The run trains on the completions of another run, which has the same settings.
    """

    recipe: str
    backend: str
    settings: Settings
    ends: tuple[End, ...]
    exact: bool
    replays: bool = False

    def replay(self, run: Path) -> Case:
        """The same case, with a run that trains on the completions of ``run`` and has no evaluations."""
        engine = {"name": "replay", "options": {"run": str(run)}}
        return replace(self, settings={**self.settings, "engine": engine, "eval": {"items": 0}})

    def named(self, name: str) -> Case:
        """The same case, with a run of this name."""
        return replace(self, settings={**self.settings, "run": {**self.settings["run"], "name": name}})


def draw_case(seed: int, folder: Path) -> Case:
    """Draw a case, and write the files that it needs into ``folder``."""
    chance = Random(seed)
    recipe = chance.choice(("grpo",) * 10 + ("ppo",) * 3 + ("sft",) * 3 + ("dpo",) * 3 + ("rm",))
    backend = chance.choice(("inline",) * 8 + ("local",))
    settings = _draw_common(chance, folder, recipe)
    exact = True
    if recipe in ("grpo", "ppo"):
        exact = _draw_reinforcement(chance, folder, recipe, settings)
    elif recipe == "dpo":
        settings["algorithm"] = {"loss": chance.choice(("dpo", "ipo", "kto", "kto", "orpo", "simpo"))}
    if backend == "local" and chance.random() < 0.6:
        settings["placement"] = {**settings.get("placement", {}), "ranks": 2}
        settings["placement"].pop("cpus", None)
        settings["parallel"]["strategy"] = chance.choice(("replicate", "fsdp2"))
    kinds = [chance.choice(("stop", "kill", "kill")) for _ in range(chance.choice((1, 1, 1, 2)))]
    ends = tuple(End(kind, chance.random()) for kind in kinds)
    return Case(recipe, backend, settings, ends, exact, replays=exact and recipe == "grpo" and chance.random() < 0.15)


def _write_data(folder: Path, rows: int) -> str:
    path = folder / "rows.jsonl"
    numbers = [37 * n % 100 for n in range(rows)]
    lines = (
        {"prompt": f"{n:02d}=", "answer": f"{n:02d}", "chosen": f"{n:02d}", "rejected": f"{n % 10}{(n // 10 + 1) % 10}"}
        for n in numbers
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def _draw_common(chance: Random, folder: Path, recipe: str) -> Settings:
    """The sections that all recipes have."""
    answers = recipe == "sft"
    config = {
        **MODEL,
        "num_hidden_layers": 1,
        **({"attention_dropout": 0.2} if answers and chance.random() < 0.5 else {}),
    }
    model: Settings = {"config": config, "tokenizer": "chars:0123456789= ", "seed": chance.randrange(9)}
    if recipe != "rm" and chance.random() < 0.3:
        model["lora"] = {"rank": 2, **({"dropout": 0.2} if answers and chance.random() < 0.5 else {})}
    elif chance.random() < 0.15:
        model["dtype"] = "bfloat16"
    steps = chance.randint(3, 6)
    settings: Settings = {
        "run": {"dir": str(folder / "runs"), "steps": steps, "seed": chance.randrange(99), "resume": "auto"},
        "model": model,
        "data": {"train": _write_data(folder, chance.choice((14, 30, 60))), "holdout": 0.2},
        "optim": {
            "lr": chance.choice((1e-2, 1e-3)),
            "weight_decay": chance.choice((0.0, 0.1)),
            "grad_clip": chance.choice((0.0, 1.0)),
            "lr_schedule": chance.choice(("constant", "linear", "cosine")),
            "warmup_steps": chance.choice((0, 0, 1, 2)),
        },
        "eval": _draw_evaluation(chance, recipe),
        "save": {
            "every": chance.choice((0, 1, 1, 2, 3)),
            "keep": chance.choice((0, 1, 2, 2)),
            "keep_best": chance.choice((0, 0, 1, 2)),
            "minutes": chance.choice((15.0, 15.0, 15.0, 1e-9)),
        },
        "parallel": {
            "micro_batch_tokens": chance.choice((None, None, 24)),
            "precision": chance.choice(("auto",) * 4 + ("bfloat16",)),
        },
        "placement": {"cpus": 1},
    }
    if model.get("dtype") == "bfloat16":
        settings["optim"]["master_weights"] = chance.choice((True, False))
    if recipe in ("sft", "dpo", "rm"):
        settings["batch"] = {"examples": chance.choice((5, 8))}
        settings["sampling"] = {"max_new_tokens": 4}
    if chance.random() < 0.15:
        settings["run"]["epochs"] = chance.choice((0.5, 1.3, 2))
    return settings


def _draw_evaluation(chance: Random, recipe: str) -> Settings:
    if chance.random() < 0.15:
        return {"items": 0}
    every = chance.choice((0, 1, 1, 2, 3))
    evaluation: Settings = {"items": chance.choice((3, 6)), "every": every, "at_start": chance.random() < 0.7}
    if every and chance.random() < 0.4:
        evaluation["patience"] = chance.choice((1, 2, 3))
    if recipe in ("grpo", "ppo"):
        evaluation["temperature"] = chance.choice((0.0, 0.8, {"temperature": 0.9, "n": 2}))
        evaluation["metric"] = chance.choice(("auto", "auto", "reward"))
    elif recipe == "sft":
        evaluation["metric"] = chance.choice(("auto", "loss", "token_accuracy", "reward"))
    return evaluation


def _draw_reinforcement(chance: Random, folder: Path, recipe: str, settings: Settings) -> bool:
    """Draw what rewards train. Returns whether two runs are the same to the bit."""
    group = recipe == "grpo"
    (folder / "scorer.py").write_text(SCORER)
    settings["reward"] = {
        "name": chance.choice(("fraction", "exact", f"{folder}/scorer.py:by_letters", f"{folder}/scorer.py:sometimes")),
        "processes": 1,
    }
    if chance.random() < 0.2:
        settings["reward"]["name"] = ("exact", f"{folder}/scorer.py:by_letters")
    if chance.random() < 0.4:
        settings["reward"]["correct_at"] = 0.5
    settings["sampling"] = {
        "max_new_tokens": chance.choice((2, 4)),
        "temperature": chance.choice((1.0, 1.0, 0.7)),
        **chance.choice(({}, {}, {"top_k": 5}, {"top_p": 0.9})),
        **({"n": chance.choice((2, 4))} if group else {}),
    }
    settings["engine"] = {
        "name": chance.choice(("auto", "auto", "transformers")),
        "max_sequences": chance.choice((128, 128, 3)),
    }
    count = chance.choice((2, 4))
    settings["batch"] = {"prompts": _draw_prompts(chance, count, group) if chance.random() < 0.5 else count}
    settings["algorithm"] = _draw_algorithm(chance, group)
    if "lora" in settings["model"]:  # the reference takes the weights of a policy without adapters
        settings["algorithm"].get("options", {}).pop("reference_refresh", None)
    if settings["algorithm"]["advantage"] == "gdpo":
        settings["reward"]["name"] = ("exact", f"{folder}/scorer.py:by_letters")
    if not isinstance(settings["reward"]["name"], str):  # of several rewards it says what is correct
        settings["reward"].setdefault("correct_at", 0.5)
    if not group:
        settings["critic"] = {"lr": chance.choice((1e-2, 1e-3))}
    schedule = chance.choice(("sync",) * 4 + ("one_step_off", "asynchronous"))
    settings["run"]["schedule"] = schedule
    if schedule != "sync" or chance.random() < 0.2:
        settings["placement"] = {"layout": "split", **chance.choice(({}, {}, {"delta_sync": True}))}
    if schedule == "asynchronous":
        settings["run"]["max_staleness"] = chance.choice((1, 2))
    if group and chance.random() < 0.12:
        (folder / "chat.jinja").write_text(TEMPLATE)
        settings["data"]["chat_template"] = str(folder / "chat.jinja")
        settings["environment"] = {"name": "bench.chaos.world:copied"}
        del settings["reward"]
        return False
    return schedule == "sync"


def _draw_prompts(chance: Random, count: int, group: bool) -> Settings:
    prompts: Settings = {
        "count": count,
        "filter": chance.choice(("none", "rewards", "accuracy") if group else ("none",)),
    }
    if prompts["filter"] != "none":
        prompts["refills"] = chance.choice((0, 1, 3))
    if chance.random() < 0.5:
        prompts["skip_solved"] = chance.choice((0.5, 1.0))
    if chance.random() < 0.5:
        prompts["curriculum"] = chance.choice(("failures", "variance"))
    return prompts


def _draw_algorithm(chance: Random, group: bool) -> Settings:
    algorithm: Settings = {
        "advantage": chance.choice(GROUP_ADVANTAGES if group else CRITIC_ADVANTAGES),
        "minibatches": chance.choice((1, 1, 2)),
        "epochs": chance.choice((1, 1, 2, {"count": 2, "max_kl": 0.01})),
        "correction": chance.choice(("auto", "auto", *CORRECTIONS)),
        "cut_off": chance.choice(("learn", "learn", "leave_out")),
        "entropy_coef": chance.choice((0.0, 0.01, {"target": 2.0, "delta": 1e-3, "max": 0.01})),
    }
    options: Settings = {"pass_k": 1} if algorithm["advantage"] == "pass_at_k" else {}
    if group:
        loss = chance.choice(LOSSES + LOSSES_OF_GENERATORS)
        if loss in LOSSES_OF_GENERATORS:
            algorithm["correction"] = "auto"
        algorithm["loss"] = {loss: 1.0, "cross_entropy": 0.3} if chance.random() < 0.15 else loss
    else:
        options = {
            "critic_warmup": chance.choice((0, 2)),
            "critic_trunk": chance.choice(("separate", "shared", "detached")),
        }
    if chance.random() < 0.5:
        places = ("loss",) if algorithm["advantage"] in ADVANTAGES_OF_GRADES else ("loss", "reward", "reward")
        algorithm |= {"kl_in": chance.choice(places), "kl_coef": 0.05}
        algorithm["kl_estimator"] = chance.choice(("k2", "k3", "k3+", "abs"))
        if algorithm["kl_in"] == "reward" and chance.random() < 0.6:
            algorithm["kl_target"] = 0.01
        if chance.random() < 0.5:
            options |= {"reference_refresh": chance.choice((1, 2)), "reference_mix": chance.choice((1.0, 0.5))}
    return algorithm | ({"options": options} if options else {})
