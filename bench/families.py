"""Try every family of models in each way that Podium uses them, and write the table of docs/models.md.

    python -m bench.families                      all families: print the table
    python -m bench.families qwen3 gpt_oss        these, by their model_type
    python -m bench.families --write              all, and write the table into the page

Each model is made tiny from its transformers configuration, with random weights, in float32 on the CPU. A figure is the
largest difference of a token's log-probability, in nats, from a forward pass over its row alone.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from podium import Cluster, connect
from podium.data import Batch
from podium.errors import ConfigError, EndpointError, PodiumError
from podium.models import LoraConfig, ModelConfig, load_model
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.sampling import SamplingParams
from podium.trainer import PRELOAD
from podium.training import OptimConfig, ParallelConfig
from podium.workers import Policy
from podium_testing.engines import compute_trained_logprobs
from tests.unit.training import families
from tests.unit.workers.tiny import oracle_logprobs, recorded

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "models.md"
COLUMNS: Final = ("native", "transformers", "padded", "packed", "FSDP2", "LoRA")
RIGHT: Final = 1e-4  # what differs by more is wrong; float32 gives 1e-6
_SHAPES: Final = families.APART | families.MIXING
_BASE: Final = _SHAPES["llama"]
FAMILIES: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("Llama 2, 3", _BASE),
    "qwen2": ("Qwen2, Qwen2.5", _BASE),
    "qwen3": ("Qwen3", _SHAPES["qwen3"]),
    "qwen3_moe": ("Qwen3-MoE", _SHAPES["qwen3_moe"]),
    "qwen3_next": ("Qwen3-Next", _SHAPES["qwen3_next"]),
    "qwen3_5_text": ("Qwen3.5 (text)", _SHAPES["qwen3_5_text"]),
    "qwen3_5_moe_text": ("Qwen3.5-MoE (text)", _SHAPES["qwen3_5_moe_text"]),
    "mistral": ("Mistral", _SHAPES["mistral"]),
    "mixtral": ("Mixtral", _SHAPES["mixtral"]),
    "smollm3": ("SmolLM3", {**_BASE, "no_rope_layers": [1, 0]}),
    "gemma2": ("Gemma 2", _SHAPES["gemma2"]),
    "gemma3_text": ("Gemma 3 (text)", _SHAPES["gemma3_text"]),
    "phi3": ("Phi-3, Phi-4", _BASE),
    "olmo2": ("OLMo 2", _BASE),
    "olmo3": ("OLMo 3", _SHAPES["olmo3"]),
    "gpt_oss": ("gpt-oss", _SHAPES["gpt_oss"]),
    "lfm2": ("LFM2", _SHAPES["lfm2"]),
    "minimax": ("MiniMax-Text-01", _SHAPES["minimax"]),
    "granite": ("Granite 3", _BASE),
    "cohere2": ("Command R7B", {**_BASE, "sliding_window": 8}),
    "glm4": ("GLM-4", {**_BASE, "head_dim": 8}),
    "falcon_h1": ("Falcon-H1", _SHAPES["falcon_h1"]),
    "mamba2": ("Mamba 2", _SHAPES["mamba2"]),
    "gpt2": ("GPT-2", _SHAPES["gpt2"]),
}
"""By model type, the name that people know, and the fields of a tiny configuration."""

_TOKENIZER: Final = "chars:0123456789+="
_STEP: Final = OptimConfig(lr=1e-2)
_FSDP2: Final = ParallelConfig(strategy="fsdp2")
_PROMPTS: Final = [[4, 9, 15], [7, 5, 12, 30, 31, 8, 22, 17, 40, 3, 6], [20, 21, 22, 23, 24, 25]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.families", description=__doc__)
    parser.add_argument("families", nargs="*", help=f"model types: {', '.join(FAMILIES)}")
    parser.add_argument("--write", action="store_true", help="write the table of all families into docs/models.md")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.families if name not in FAMILIES]:
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    lines = [*_HEAD, *rows(options.families or list(FAMILIES))]
    print("\n".join(lines))  # noqa: T201 - this is the command's output
    if options.write and not options.families:
        PAGE.write_text(_TABLE.sub(lambda _: "\n".join(lines) + "\n", PAGE.read_text()))
    return 0


def rows(model_types: Sequence[str]) -> Iterator[str]:
    """Yield a line of the table for each family."""
    with connect("local", preload=PRELOAD) as cluster:
        for model_type in model_types:
            cells = measure(model_type, cluster)
            yield f"| {FAMILIES[model_type][0]} | `{model_type}` | {' | '.join(cells[name] for name in COLUMNS)} |"


def statements(line: str) -> list[str]:
    """What a line of the table says, without its digits: a figure counts as right or as wrong."""
    cells = line.strip("| \n").split(" | ")[2:]
    return [re.sub(r"\de[-+]\d+", lambda number: str(float(number[0]) < RIGHT), cell) for cell in cells]


def measure(model_type: str, cluster: Cluster) -> dict[str, str]:
    """Return the cells of one family, by column."""
    with tempfile.TemporaryDirectory() as folder:
        config = _saved(model_type, Path(folder) / "model")
        model = load_model(config)
        batch = recorded()
        mask = batch.jagged("loss_mask").values
        alone = torch.cat([oracle_logprobs(model, row) for row in batch.jagged("tokens").unbind()])[mask]

        def off(policy: Any, expected: Tensor = alone) -> float:
            scored: Batch = policy.logprobs(batch).fetch()
            return float((scored.jagged("old_logprobs").values[mask] - expected).abs().max())

        def padded() -> str:
            policy = Policy(config, parallel=ParallelConfig(batching="padded"))
            equal = policy.engine.batching == "equal"
            return _figure(off(policy)) + (" (rows of one length)" if equal else "")

        def fsdp2() -> str:
            whole = Policy(config, _STEP)
            whole.update(batch)
            trained = whole.logprobs(batch).jagged("old_logprobs").values[mask]
            sharded = cluster.start(Policy.bind(config, _STEP, _FSDP2), cluster.pool([2]))
            try:
                before = off(sharded)
                sharded.update(batch)
                return _figure(max(before, off(sharded, trained)))
            finally:
                sharded.group.close()

        def lora() -> str:
            policy = Policy(replace(config, lora=LoraConfig(rank=4)))
            torch.manual_seed(1)
            for name, parameter in policy.model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.1)
            adapted = policy.logprobs(batch).jagged("old_logprobs").values[mask]
            policy.save_pretrained(str(Path(folder) / "merged"))
            merged = Policy(replace(config, path=str(Path(folder) / "merged")))
            if (adapted - alone).abs().max() < RIGHT:
                raise PodiumError("the adapters change nothing")
            return _figure(off(merged, adapted))

        tries: dict[str, Callable[[], str]] = {
            "native": lambda: _engine("native", config),
            "transformers": lambda: _engine("transformers", config),
            "padded": padded,
            "packed": lambda: _figure(off(Policy(config, parallel=ParallelConfig(batching="packed")))),
            "FSDP2": fsdp2,
            "LoRA": lora,
        }
        return {name: _cell(f"{model_type}, {name}", tries[name]) for name in COLUMNS}


def _cell(subject: str, attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except ConfigError as error:
        print(f"{subject}: {error}", file=sys.stderr)  # noqa: T201 - the reason is not in the table
        return "no"
    except EndpointError as error:
        if not isinstance(error.__cause__, ConfigError):
            raise
        print(f"{subject}: {error.__cause__}", file=sys.stderr)  # noqa: T201 - likewise
        return "no"


def _figure(nats: float) -> str:
    text = f"{nats:.0e}".replace("e-0", "e-")
    return text if nats < RIGHT else f"**{text}**"


def _engine(name: str, config: ModelConfig) -> str:
    """The difference over greedy and sampled completions of prompts of several lengths."""
    model, reference = load_model(config), load_model(config)
    engine = make_engine(EngineConfig(name=name), model)
    worst = 0.0
    for temperature in (0.0, 0.7):
        params = SamplingParams(max_new_tokens=16, temperature=temperature)
        for prompt, completion in zip(_PROMPTS, engine.generate(_PROMPTS, params, range(3)), strict=True):
            expected = compute_trained_logprobs(reference, prompt, completion, temperature or 1.0)
            worst = max(worst, float((completion.logprobs - expected).abs().max()))
    return _figure(worst)


def _saved(model_type: str, folder: Path) -> ModelConfig:
    """Save a tiny model, whose weights are far from their defaults so that each of them matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **FAMILIES[model_type][1]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if "norm" in name else 0.1)
    model.save_pretrained(folder)
    return ModelConfig(path=str(folder), tokenizer=_TOKENIZER)


_HEAD: Final = [
    f"| family | `model_type` | {' | '.join(COLUMNS)} |",
    "|---|---|" + "---|" * len(COLUMNS),
]
_TABLE: Final = re.compile(r"^\| family .*\n(\|.*\n)+", re.MULTILINE)

if __name__ == "__main__":
    sys.exit(main())
