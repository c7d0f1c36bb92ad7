"""GRPO on one page: a language model of 125,000 parameters learns to copy digits, in half a minute on one core.

python examples/grpo_loop.py [STEPS]"""

import sys

import torch

import podium
from podium.algorithms import AlgorithmConfig
from podium.data import Batch, Jagged
from podium.data.sampled_text import completion_texts
from podium.models import ModelConfig, load_tokenizer
from podium.rewards import Grader, RewardConfig
from podium.rollout.sampling import SamplingParams
from podium.training import OptimConfig
from podium.workers import ColocatedSync, Estimator, Generator, Policy

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 160
PROMPTS, COMPLETIONS = 32, 8  # prompts a step, completions a prompt
SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "tie_word_embeddings": True}

torch.manual_seed(0)
model = ModelConfig(config={"model_type": "qwen3", **SHAPE}, tokenizer="chars:0123456789= ")  # or path="Qwen/…"
tokenizer = load_tokenizer(model.tokenizer_source)
sampling = SamplingParams(max_new_tokens=3, n=COMPLETIONS)
algorithm = AlgorithmConfig(advantage="grpo")  # a completion's reward, compared with the others of its prompt
curve: list[float] = []

with podium.connect("local") as cluster, Grader(RewardConfig(name="fraction")) as grader:
    # Three workers in one process of one thread. The generator reads the policy's weights where they are.
    bound = Policy.bind(model, OptimConfig(lr=1e-3), algorithm=algorithm)
    policy = cluster.start(bound, cluster.pool([1], cpus=1))
    estimator = cluster.start(Estimator.bind(algorithm), into=policy)
    generator = cluster.start(Generator.bind(model), into=policy)
    weights = ColocatedSync(generator)

    for step in range(1, STEPS + 1):
        # Take prompts: "123=" is to be answered by "123".
        answers = [f"{number:03d}" for number in torch.randint(1000, (PROMPTS,)).tolist()]
        tokens = Jagged.from_rows([torch.tensor(tokenizer.encode(f"{answer}=")) for answer in answers])
        seeds = torch.randint(2**62, (PROMPTS, COMPLETIONS))  # one seed for each completion
        group = torch.arange(PROMPTS)  # the completions of one prompt are a group; grpo compares their rewards
        # Generate. The completions' tensors stay with the worker; the script holds references to them.
        batch = generator.generate(Batch({"prompt_tokens": tokens, "seed": seeds, "group": group}), sampling)
        # Grade: the share of digits in their places. The completions of a prompt are side by side.
        rows = [{"answer": answer} for answer in answers for _ in range(COMPLETIONS)]
        grades = grader.grade(completion_texts(batch, tokenizer), rows)
        batch = batch.with_columns(rewards=torch.tensor([grade.score for grade in grades]))
        # Compute the advantages from the rewards, within each group.
        batch = batch.merge(estimator.advantages(batch.select("loss_mask", "rewards", "group")))
        metrics = policy.accumulate(batch) | policy.step()  # the gradient of all rows, and one optimizer step
        weights.sync(step)  # the generator drops what it derived from the old weights; new tokens get version `step`
        curve.append(float(batch.dense("rewards").mean()))
        print(f"step {step:3}  reward {curve[-1]:.3f}  entropy {metrics['policy/entropy']:.2f}", flush=True)

for first in range(0, STEPS, size := max(1, STEPS // 16)):  # the curve: mean reward of each sixteenth of the run
    mean = sum(curve[first : first + size]) / len(curve[first : first + size])
    print(f"{first + 1:4} {'█' * round(60 * mean)} {mean:.2f}")
