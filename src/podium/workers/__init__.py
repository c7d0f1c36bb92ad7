"""Where models and algorithms meet the runtime: policy, critic, reference, generator and estimator."""

from podium.workers.critic import Critic
from podium.workers.engine import MicroLoss, StepResult, TrainEngine
from podium.workers.estimator import Estimator
from podium.workers.generator import POLICY_ROLE, Generator
from podium.workers.learner import Learner
from podium.workers.models import LoraConfig, ModelConfig, load_model
from podium.workers.optim import OptimConfig, learning_rate
from podium.workers.parallel import ParallelConfig
from podium.workers.policy import Policy
from podium.workers.publication import ColocatedPublication, Publication, StreamedPublication
from podium.workers.reference import Reference
from podium.workers.texts import completion_texts, sampled_tokens
from podium.workers.tokenizers import char_tokenizer, load_tokenizer

__all__ = [
    "POLICY_ROLE",
    "ColocatedPublication",
    "Critic",
    "Estimator",
    "Generator",
    "Learner",
    "LoraConfig",
    "MicroLoss",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "Policy",
    "Publication",
    "Reference",
    "StepResult",
    "StreamedPublication",
    "TrainEngine",
    "char_tokenizer",
    "completion_texts",
    "learning_rate",
    "load_model",
    "load_tokenizer",
    "sampled_tokens",
]
