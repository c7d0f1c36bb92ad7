"""Which process of a run imports what, since imports are most of a short run's time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from podium.trainer import GRPOConfig, config_to_yaml
from tests.integration.training import tiny

ONLY_FOR_MODELS = ("transformers.modeling_utils", "transformers.generation.utils", "transformers.masking_utils")
ONLY_FOR_MODELS += (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
)

SCRIPT = """
import importlib, json, sys
from podium.trainer import PRELOAD, GRPOConfig, PPOTrainer, load_config

class Looking(PPOTrainer):
    def finish(self, done):
        self.theirs = self.run.roles.policy.group.run(lambda worker: list(__import__("sys").modules))[0]
        return super().finish(done)

trainer = Looking(load_config(GRPOConfig, sys.argv[1]), show=False)
imported = list(sys.modules)
trainer.fit()
mine = list(sys.modules)
for name in PRELOAD:
    importlib.import_module(name)
print(json.dumps([imported, mine, trainer.theirs, list(sys.modules)]))
"""


@pytest.mark.exhaustive
def test_only_workers_import_what_only_models_need_and_before_they_are_made(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(config_to_yaml(tiny(GRPOConfig, tmp_path, run={"steps": 1}, save={"model": False})))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(file)], capture_output=True, text=True, check=True, timeout=200
    )
    imported, controller, worker, preloaded = (set(names) for names in json.loads(done.stdout.splitlines()[-1]))
    assert "transformers" in imported
    assert not {*ONLY_FOR_MODELS} & controller
    assert {*ONLY_FOR_MODELS} <= worker
    late = {
        name for name in worker - preloaded if name.startswith(("transformers.", "torch.distributed.", "torch._dynamo"))
    }
    assert all("qwen3" in name for name in late), late  # what one kind of model alone needs
    assert "pyarrow.parquet" in controller - imported
