"""The loops: they alone know the order of things. Configuration, checkpoints, evaluation and reports belong to them."""

from podium.trainer.config import GRPOConfig, PPOConfig, SFTConfig, config_class
from podium.trainer.loading import Key, build_config, config_to_yaml, keys_of, load_config
from podium.trainer.ppo import PPOTrainer
from podium.trainer.run_dir import Summary

__all__ = [
    "GRPOConfig",
    "Key",
    "PPOConfig",
    "PPOTrainer",
    "SFTConfig",
    "Summary",
    "build_config",
    "config_class",
    "config_to_yaml",
    "keys_of",
    "load_config",
]
