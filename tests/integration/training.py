"""Small runs for the tests of training: a model of a few thousand parameters, a handful of rows, two or three steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from podium.runtime import Cluster, ResourcePool
from podium.trainer import PPOConfig, PPOTrainer, SFTConfig, SFTTrainer, build_config

C = TypeVar("C")

MODEL = {
    "config": {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    },
    "tokenizer": "chars:0123456789= ",
}


def write_copy_task(folder: Path, rows: int = 60) -> Path:
    """``12=`` to be answered by ``12``."""
    path = folder / "copy.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n:02d}=", "answer": f"{n:02d}"}) + "\n" for n in range(rows)))
    return path


def tiny(cls: type[C], folder: Path, **sections: Mapping[str, Any]) -> C:
    """A configuration of ``cls`` for the copy task in ``folder``; ``sections`` win over what is set here."""
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "runs"), "name": "run", "steps": 2},
        "model": MODEL,
        "data": {"train": str(write_copy_task(folder)), "holdout": 0.2},
        "reward": {"name": "fraction", "processes": 1},
        "sampling": {"max_new_tokens": 3},
        "optim": {"lr": 1e-2},
        "eval": {"items": 4},
    }
    placement = sections.get("placement", {})
    if placement.get("layout", "colocated") == "colocated" and not placement.keys() & {"ranks", "pools"}:
        values["placement"] = {"cpus": 1}  # see slots()
    names = {"PPOConfig": {"prompts": 4}, "GRPOConfig": {"prompts": 4}}
    values["batch"] = names.get(cls.__name__, {"examples": 8})
    if cls.__name__ == "GRPOConfig":
        values["sampling"]["n"] = 4
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return build_config(cls, values)


@contextmanager
def slots(cluster: Cluster, ranks: int) -> Iterator[ResourcePool]:
    """A slot for each rank. A process that is alone would compute in as many threads as there are cores, and they wait
    for one another actively, which on a busy machine takes ten times as long."""
    pool = cluster.pool([ranks], cpus=1 if ranks == 1 else 0)
    try:
        yield pool
    finally:
        cluster.release(pool)


def train(config: PPOConfig | SFTConfig, cluster: Cluster | str = "inline", **options: Any) -> Path:
    """Train, and return the directory of the run."""
    if isinstance(config, SFTConfig):
        SFTTrainer(config, cluster=cluster, show=False, **options).fit()
    else:
        PPOTrainer(config, cluster=cluster, show=False, **options).fit()
    return Path(config.run.dir) / config.run.name


def metrics_rows(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The rows of metrics.jsonl."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def timeless(run: Path) -> list[dict[str, Any]]:
    """Every number of the run's steps but those of the clock."""
    return [
        {name: value for name, value in row.items() if not name.startswith("time") and "per_s" not in name}
        for row in metrics_rows(run)
    ]


def losses(run: Path) -> list[float]:
    """The loss of each step, in order."""
    return [row["loss"] for row in metrics_rows(run)]
