"""The training loops, with their configuration, checkpoints, evaluation and reports."""

import sys
from typing import TYPE_CHECKING, Any

from podium.lazy import lazy_exports
from podium.telemetry import active

if TYPE_CHECKING:
    from podium.config import (
        Key as Key,
        build_config as build_config,
        config_to_yaml as config_to_yaml,
        keys_of as keys_of,
        load_config as load_config,
        read_values as read_values,
    )
    from podium.runs.config import (
        GRPOConfig as GRPOConfig,
        InferenceConfig as InferenceConfig,
        PPOConfig as PPOConfig,
        SFTConfig as SFTConfig,
    )
    from podium.runs.evaluation import Evaluation as Evaluation
    from podium.runs.run_writer import Summary as Summary
    from podium.runs.sections import (
        CriticConfig as CriticConfig,
        EvalConfig as EvalConfig,
        ExampleBatch as ExampleBatch,
        PlacementConfig as PlacementConfig,
        PoolConfig as PoolConfig,
        PromptBatch as PromptBatch,
        RunConfig as RunConfig,
        SaveConfig as SaveConfig,
    )
    from podium.trainer.ppo import PPOTrainer as PPOTrainer
    from podium.trainer.preload import PRELOAD as PRELOAD
    from podium.trainer.sft import SFTTrainer as SFTTrainer
else:
    _load_export, __dir__, __all__ = lazy_exports(__name__)

    def __getattr__(name: str) -> Any:
        if name in ("PPOTrainer", "SFTTrainer") and not {"torch", "transformers"} <= sys.modules.keys():
            _announce_imports()
        return _load_export(name)


def _announce_imports() -> None:
    """Say on stderr that a script's first seconds are imports. A program that shows events says it by itself."""
    if sys.stderr is not None and not active():
        sys.stderr.write("podium: importing torch and transformers\n")
        sys.stderr.flush()
