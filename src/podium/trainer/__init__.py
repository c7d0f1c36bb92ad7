"""The loops: they alone know the order of things. Configuration, checkpoints, evaluation and reports belong to them."""

from podium.trainer.config import GRPOConfig, InferenceConfig, PPOConfig, SFTConfig, config_class
from podium.trainer.evaluate import evaluate_model, open_sampler
from podium.trainer.loading import Key, build_config, config_to_yaml, keys_of, load_config, read_values
from podium.trainer.plan import describe_plan
from podium.trainer.ppo import PPOTrainer
from podium.trainer.report import Accuracy
from podium.trainer.run_dir import Summary
from podium.trainer.sections import (
    CriticConfig,
    EvalConfig,
    ExampleBatch,
    PlacementConfig,
    PromptBatch,
    RunConfig,
    SaveConfig,
)
from podium.trainer.session import PRELOAD, run_config_path
from podium.trainer.sft import SFTTrainer
from podium.trainer.state import Evaluation

__all__ = [
    "PRELOAD",
    "Accuracy",
    "CriticConfig",
    "EvalConfig",
    "Evaluation",
    "ExampleBatch",
    "GRPOConfig",
    "InferenceConfig",
    "Key",
    "PPOConfig",
    "PPOTrainer",
    "PlacementConfig",
    "PromptBatch",
    "RunConfig",
    "SFTConfig",
    "SFTTrainer",
    "SaveConfig",
    "Summary",
    "build_config",
    "config_class",
    "config_to_yaml",
    "describe_plan",
    "evaluate_model",
    "keys_of",
    "load_config",
    "open_sampler",
    "read_values",
    "run_config_path",
]
