"""What each rank holds at most while it loads a model of 1 GB: `python -m bench.loading`.

Over 1, 2 and 4 ranks on gloo, on the backend `local`. A figure is the largest rank's peak of resident memory (VmHWM,
private and shared pages) less what it held before, in shares of the parameters' bytes. Before that each rank has loaded
a tiny model of the same kind, so that imports count nowhere. `load` reads the model; `start` also makes the engine,
which tries two rows on it, so that FSDP2 gathers a layer at a time. Beside that, what loading the whole model and then
sharding it takes. A load alone of the whole model maps its files and reads nothing yet.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.controller_memory import PROC, RESET_PEAK, SELF, resident
from bench.measure import Row
from podium import connect
from podium.models import ModelConfig, load_model
from podium.runtime import Worker, endpoint, gather
from podium.trainer import PRELOAD
from podium.training import ParallelConfig, TrainEngine
from podium.training.sharded_loading import load_parallel

RANKS = (1, 2, 4)
FSDP2 = ParallelConfig(strategy="fsdp2")
CPU = torch.device("cpu")
SHAPE: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 19,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
TINY = {**SHAPE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}


class Loader(Worker):
    """Loads models and lets go of them."""

    def __init__(self, tiny: str) -> None:
        for whole in (False, True):
            self._load(tiny, whole, engine=True)

    @endpoint(collect=gather())
    def peak(self, path: str, whole: bool, engine: bool) -> int:
        before = resident(SELF, "VmRSS")
        (PROC / SELF / "clear_refs").write_text(RESET_PEAK)
        self._load(path, whole, engine)
        return resident(SELF, "VmHWM") - before

    def _load(self, path: str, whole: bool, engine: bool) -> None:
        config = ModelConfig(path=path)
        model = load_model(config) if whole else load_parallel(config, FSDP2, CPU)
        if engine:
            TrainEngine(model, optim=None, parallel=FSDP2, device=CPU, world_size=self.ctx.world_size)


def saved(shape: Mapping[str, Any], folder: Path) -> int:
    """Save a model with random weights. Return the bytes of its parameters."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape))
    model.save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


def rows(folder: Path) -> list[Row]:
    nbytes = saved(SHAPE, folder / "model")
    saved(TINY, folder / "tiny")
    found: list[Row] = []
    for ranks in RANKS:
        for engine in (False, True):
            shares: list[float] = []
            for whole in (False, True)[: 1 + engine]:
                with connect("local", preload=PRELOAD) as cluster:  # fresh processes, whose heap nothing has used
                    group = cluster.start(Loader.bind(str(folder / "tiny")), cluster.pool([ranks]))
                    shares.append(max(group.peak(str(folder / "model"), whole, engine)) / nbytes)
            row = Row(
                name=f"{'start' if engine else 'load'}_memory_{ranks}_ranks",
                unit="of the parameters",
                median=shares[0],
                quartiles=(shares[0], shares[0]),
                better="lower",
                floor=f"a rank's own shard, {1 / ranks:.2f}",
                others=dict(zip(("whole",), shares[1:], strict=False)),
            )
            sys.stdout.write(json.dumps(row.as_json()) + "\n")
            sys.stdout.flush()
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.loading", description=__doc__)
    parser.add_argument("--out", type=Path, help="where the rows go, as JSON; they are printed in any case")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory(prefix="podium-bench-") as folder:
        found = rows(Path(folder))
    if out:
        out.write_text(json.dumps([row.as_json() for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
