"""The peak of memory of worker processes beside the dry run's estimate: `python -m bench.memory`.

Each configuration trains a model of 64 million parameters with random weights for two steps, on the backend `local`;
those whose names begin with smollm2 train SmolLM2-135M. A figure is the most anonymous and shared memory that a worker
process held (RssAnon and RssShmem, read every 20 ms), less what it held before it made its first model. A process
without the policy counts anonymous memory alone, because what it shares are the policy's weights, which it maps. Pages
of files, such as those of libraries, count on neither side: the kernel drops them when memory is short. The first
five configurations are those that the estimate was made with; the others were tried afterwards.

    python -m bench.memory                    all of them: a quarter of an hour on two quiet cores
    python -m bench.memory full lora          these alone
    python -m bench.memory --report           measures nothing

The figures go into bench/memory.json, and from there into docs/training.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from bench.census import PROC
from bench.report import put_section
from podium.models import ModelConfig, load_model
from podium.models.tokenizers import load_tokenizer
from podium.trainer import GRPOConfig, PPOConfig, PPOTrainer, SFTConfig, SFTTrainer, build_config
from podium.training import OptimConfig, ParallelConfig, TrainEngine
from podium.workers import Critic, Generator, Policy, Reference
from podium_dryrun import describe_memory
from podium_dryrun.data import count_tokens

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "bench" / "memory.json"
SMOLLM2: Final = ROOT / ".cache" / "real" / "model"
PAGE: Final = ROOT / "docs" / "training.md"
MARK: Final = "<!-- begin: python -m bench.memory -->"
BASES: Final = "PODIUM_BENCH_BASES"
INTERVAL_S: Final = 0.02
MIB: Final = 1 << 20
SHAPE: Final[Mapping[str, Any]] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
SMALL_WORDS: Final[Mapping[str, Any]] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 14,
}


class Case:
    """A configuration: its title, class, words of a prompt, changes of the model, and of the usual settings.

    ``published`` says that the model is SmolLM2-135M, which `python examples/real/convert.py` fetches.
    """

    def __init__(
        self,
        title: str,
        cls: type[PPOConfig | SFTConfig] = GRPOConfig,
        prompt: int = 32,
        shape: Mapping[str, Any] | None = None,
        *,
        published: bool = False,
        **sections: Mapping[str, Any],
    ) -> None:
        self.title, self.cls, self.prompt, self.shape, self.sections = title, cls, prompt, shape or {}, sections
        self.published = published

    def of_published(self) -> Case:
        """The same configuration of the published model, whose tokenizer splits each word into about five tokens."""
        words = self.prompt if self.prompt < 100 else self.prompt // 5
        return Case(self.title, self.cls, words, published=True, **self.sections)


SPLIT: Final = {"layout": "split", "ranks": 1, "generator_ranks": 1, "cpus": 1}
FITTED: Final = {
    "full": Case("all weights, GRPO"),
    "lora": Case("adapters of rank 16", model={"lora": {"rank": 16}}),
    "fsdp2": Case("fsdp2 over two ranks", placement={"ranks": 2}, parallel={"strategy": "fsdp2"}),
    "critic": Case("with a critic, PPO", PPOConfig),
    "long": Case(
        "rows of 768 tokens",
        prompt=256,
        sampling={"n": 2, "max_new_tokens": 512},
        batch={"prompts": 2},
    ),
}
TRIED: Final = {
    "off": Case("one_step_off, a generator of its own", run={"schedule": "one_step_off"}, placement=SPLIT),
    "checkpointing": Case("gradient checkpointing", model={"gradient_checkpointing": True}),
    "words": Case("8,192 words, 8 heads, 14 layers", shape=SMALL_WORDS),
    "kl": Case("with a reference", algorithm={"kl_in": "loss"}),
    "sft": Case("fine-tuning, rows of 200 tokens", SFTConfig, prompt=190),
    "half": Case("weights in bfloat16", model={"dtype": "bfloat16"}),
    "centering": Case("score centering over 16,384 tokens", algorithm={"options": {"score_centering": 16384}}),
    "trunk": Case("a value head on the policy, PPO", PPOConfig, algorithm={"options": {"critic_trunk": "shared"}}),
}
PUBLISHED: Final = {f"smollm2-{name}": case.of_published() for name, case in FITTED.items()}
CASES: Final = FITTED | TRIED | PUBLISHED


def note_base(model: ModelConfig) -> None:
    """Write what this process holds, before it makes its first model, to a file of its own.

    Before that it makes a tiny model of the same kind, with adapters where ``model`` has some, and reads the tokenizer,
    so that what libraries import and keep counts nowhere.
    """
    path = Path(os.environ[BASES]) / str(os.getpid())
    if path.exists():
        return
    tiny = {"model_type": "llama", **SHAPE, "hidden_size": 36, "intermediate_size": 64, "num_hidden_layers": 2}
    config = replace(model, path="", tokenizer=model.path, config={**tiny, "vocab_size": 64})
    TrainEngine(load_model(config), optim=OptimConfig(), parallel=ParallelConfig(), device=torch.device("cpu"))
    load_tokenizer(model.path)
    path.write_text(json.dumps(read_own("self")))


def read_own(pid: str) -> tuple[int, int]:
    """Return the bytes of anonymous memory and of shared memory that a process has."""
    anonymous, shared = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", (PROC / pid / "status").read_text())
    return int(anonymous) * 1024, int(shared) * 1024


class NotedPolicy(Policy):
    def __init__(self, model: ModelConfig, *args: Any, **options: Any) -> None:
        note_base(model)
        super().__init__(model, *args, **options)


class NotedCritic(Critic):
    def __init__(self, model: ModelConfig, *args: Any, **options: Any) -> None:
        note_base(model)
        super().__init__(model, *args, **options)


class NotedReference(Reference):
    def __init__(self, model: ModelConfig, *args: Any, **options: Any) -> None:
        note_base(model)
        super().__init__(model, *args, **options)


class NotedGenerator(Generator):
    def __init__(self, model: ModelConfig, *args: Any, **options: Any) -> None:
        note_base(model)
        super().__init__(model, *args, **options)


WORKERS: Final = {
    "policy": NotedPolicy,
    "critic": NotedCritic,
    "reference": NotedReference,
    "generator": NotedGenerator,
}


class Watch(threading.Thread):
    """Reads the memory of the processes that have written their base, until it is stopped."""

    def __init__(self, bases: Path) -> None:
        super().__init__(daemon=True)
        self._bases, self._ended = bases, threading.Event()
        self.peaks: dict[str, tuple[int, int]] = {}
        self.trace: list[tuple[float, str, int, int]] = []

    def run(self) -> None:
        """Read until :meth:`stop`."""
        while not self._ended.wait(INTERVAL_S):
            for pid in os.listdir(self._bases):
                try:
                    anonymous, shared = read_own(pid)
                except (OSError, ValueError):  # it has ended, or is about to and has no memory any more
                    continue
                alone, both = self.peaks.get(pid, (0, 0))
                self.peaks[pid] = max(alone, anonymous), max(both, anonymous + shared)
                self.trace.append((time.time(), pid, anonymous >> 20, shared >> 20))

    def stop(self, shares: Sequence[bool]) -> list[int]:
        """Return the peak of each process above its base, in the order in which they were started; ``shares`` says of
        which shared memory counts."""
        self._ended.set()
        self.join()
        pids = sorted(self.peaks, key=lambda pid: (self._bases / pid).stat().st_mtime)
        bases = [json.loads((self._bases / pid).read_text()) for pid in pids]
        return [
            self.peaks[pid][shared] - (sum(base) if shared else base[0])
            for pid, base, shared in zip(pids, bases, shares, strict=True)
        ]


def score(completion: str, row: Mapping[str, Any]) -> float:
    """A reward that differs from completion to completion, so that each has an advantage."""
    del row
    return float(sum(map(ord, completion)) % 7)


def save_model(folder: Path, shape: Mapping[str, Any]) -> None:
    """Save a model with random weights in bfloat16, as most are published, with a tokenizer that has a token a word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape)).bfloat16().save_pretrained(folder)
    names = ["<pad>", "<end>", *(f"w{number}" for number in range(2, shape["vocab_size"]))]
    words = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)


def config_of(case: Case, folder: Path, steps: int) -> PPOConfig | SFTConfig:
    model = SMOLLM2 if case.published else folder / "model"
    if not case.published:
        save_model(model, {**SHAPE, **case.shape})
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(64):
            words = [f"w{2 + (97 * number + place) % 8000}" for place in range(case.prompt)]
            file.write(json.dumps({"prompt": f"{' '.join(words)}\n", "answer": " ".join(words[:9])}) + "\n")
    values: dict[str, Any] = {
        "run": {"dir": str(folder / "runs"), "name": "run", "steps": steps},
        "model": {"path": str(model)},
        "data": {"train": str(folder / "rows.jsonl"), "holdout": 0.2},
        "reward": {"name": "bench.memory:score", "processes": 1},
        "sampling": {"max_new_tokens": 64},
        "batch": {"prompts": 16},
        "eval": {"items": 2},
        "placement": {"cpus": 1},
    }
    if case.cls is GRPOConfig:
        values |= {"sampling": {"n": 4, "max_new_tokens": 64}, "batch": {"prompts": 4}}
    elif case.cls is SFTConfig:
        values["batch"] = {"examples": 8}
    for name, section in case.sections.items():
        values[name] = {**values.get(name, {}), **section}
    return build_config(case.cls, values)


def measure(name: str, steps: int, trace: Path | None) -> dict[str, Any]:
    """Train a configuration, and return its figures in MiB, one for each kind of process."""
    with tempfile.TemporaryDirectory(prefix="podium-bench-") as temporary:
        folder = Path(temporary)
        (folder / "bases").mkdir()
        os.environ[BASES] = str(folder / "bases")
        config = config_of(CASES[name], folder, steps)
        workers = {role: WORKERS[role] for role in config.roles if role in WORKERS}
        cls: Any = SFTTrainer if isinstance(config, SFTConfig) else PPOTrainer
        trainer = cls(config, workers=workers, show=False)
        text = describe_memory(config, "local", {}, count_tokens(trainer.read_data()))
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        watch = Watch(folder / "bases")
        watch.start()
        trainer.fit()
        peaks = watch.stop(["policy" in roles for roles, count in config.processes for _ in range(count)])
        if trace is not None:
            trace.mkdir(exist_ok=True, parents=True)
            (trace / name).write_text("\n".join(" ".join(map(str, line)) for line in watch.trace))
    return {"estimate": estimates(text), "measured": [round(peak / MIB) for peak in peaks], "lines": text.splitlines()}


def estimates(text: str) -> list[int]:
    """The estimated MiB of each process, in the order of processes."""
    units = {"GiB": 1024.0, "MiB": 1.0}
    amounts = re.findall(
        r"^memory +about ([\d.,]+) (GiB|MiB) (?:on process|each on processes) (\d+)(?:-(\d+))?", text, re.M
    )
    return [
        round(float(amount.replace(",", "")) * units[unit])
        for amount, unit, first, last in amounts
        for _ in range(int(first), int(last or first) + 1)
    ]


def table(results: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    lines = ["| configuration | estimated, MiB | measured, MiB | error |", "|---|---|---|---|"]
    for name in names:
        if name in results:
            run = results[name]
            for estimate, peak in zip(run["estimate"], run["measured"], strict=True):
                lines.append(f"| {CASES[name].title} | {estimate:,} | {peak:,} | {estimate / peak - 1:+.0%} |")
    return lines


def section(results: Mapping[str, Mapping[str, Any]]) -> str:
    """What the page says of the results, in Markdown."""
    lines = table(results, [*FITTED])
    if results.keys() & TRIED.keys():
        lines += ["", "Configurations that were tried afterwards:", "", *table(results, [*TRIED])]
    if results.keys() & PUBLISHED.keys():
        lines += [
            "",
            "SmolLM2-135M, whose tokenizer makes about 170 tokens of a prompt of 32 words:",
            "",
        ]
        lines += table(results, [*PUBLISHED])
    return "\n".join(lines)


def read_results() -> dict[str, Any]:
    """The figures of each configuration that was measured."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def main() -> None:
    """Measure what is named, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[*CASES], help=", ".join(CASES))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--trace", type=Path, help="a directory for all that was read, a line each")
    parser.add_argument("--report", action="store_true", help="write docs/training.md from the results there are")
    options = parser.parse_args()
    for name in () if options.report else options.cases:
        figures = measure(name, options.steps, options.trace)
        results = read_results() | {name: figures}  # read now, as another measurement may have ended meanwhile
        sys.stdout.write(f"{name}: estimate {results[name]['estimate']}, measured {results[name]['measured']}\n")
        sys.stdout.flush()
        RESULTS.write_text(json.dumps({key: results[key] for key in CASES if key in results}, indent=1) + "\n")
    if MARK in PAGE.read_text():
        PAGE.write_text(put_section(PAGE.read_text(), section(read_results()), MARK))


if __name__ == "__main__":
    main()
