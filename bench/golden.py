"""Record seeded runs and compare them bit for bit, before and after a change that must not alter results.

    python -m bench.golden record FOLDER [CASE ...]     on the code before the change
    python -m bench.golden compare FOLDER [CASE ...]    on the code after it, on the same machine

Each case is a short training run of a tiny model on one way through the trainer: SFT, GRPO and PPO, one and two ranks,
colocated and split. Compared are the metrics of every step (times and memory left out), all completions with their
tokens, rewards and advantages, and the final weights. Another kind of processor gives other bits, so no recording is
kept in the repository.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

MODEL: Final = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
COMMON: Final[Mapping[str, Any]] = {
    "model.config": MODEL,
    "model.tokenizer": "chars:0123456789= ",
    "data.holdout": 0.2,
    "reward.name": "fraction",
    "reward.correct_at": 1.0,
    "reward.processes": 1,
    "sampling.max_new_tokens": 4,
    "optim.lr": 1e-2,
    "eval.items": 6,
    "eval.metric": "accuracy",
    "eval.every": 2,
    "run.steps": 4,
    "run.seed": 3,
}
GROUPS: Final = {"batch.prompts": 6, "sampling.n": 4}
CASES: Final[Mapping[str, tuple[str, str, Mapping[str, Any]]]] = {
    "sft": ("sft", "local", {"batch.examples": 8}),
    "sft-two-ranks": (
        "sft",
        "local",
        {"batch.examples": 9, "placement.ranks": 2, "optim.lr_schedule": "cosine", "optim.warmup_steps": 1},
    ),
    "grpo": ("grpo", "local", GROUPS),
    "grpo-inline-rloo": (
        "grpo",
        "inline",
        {
            **GROUPS,
            "algorithm.advantage": "rloo",
            "algorithm.options.dual_clip": 3.0,
            "algorithm.minibatches": 2,
            "algorithm.aggregation": "sequence-mean",
        },
    ),
    "grpo-two-ranks": (
        "grpo",
        "local",
        {
            **GROUPS,
            "placement.ranks": 2,
            "algorithm.minibatches": 2,
            "algorithm.epochs": 2,
            "algorithm.kl_in": "loss",
            "algorithm.kl_coef": 0.01,
            "algorithm.correction": "truncate",
            "algorithm.entropy_coef": 0.01,
        },
    ),
    "grpo-split": ("grpo", "local", {**GROUPS, "placement.layout": "split", "algorithm.minibatches": 2}),
    "grpo-split-delta": (
        "grpo",
        "local",
        {
            **GROUPS,
            "placement.layout": "split",
            "placement.delta_sync": True,
            "placement.generator_ranks": 2,
            "algorithm.normalize_advantage": False,
            "algorithm.aggregation": "sequence-sum-constant",
        },
    ),
    "grpo-packed-filtered": (
        "grpo",
        "local",
        {
            **GROUPS,
            "model.config": {**MODEL, "model_type": "llama"},
            "parallel.batching": "packed",
            "parallel.micro_batch_tokens": 64,
            "sampling.top_p": 0.9,
            "sampling.top_k": 6,
            "algorithm.minibatches": 2,
            "engine.max_sequences": 16,
        },
    ),
    "grpo-lora": (
        "grpo",
        "local",
        {
            **GROUPS,
            "model.lora.rank": 2,
            "engine.name": "transformers",
            "sampling.temperature": 0.8,
            "algorithm.kl_in": "loss",
            "algorithm.kl_coef": 0.05,
            "algorithm.advantage": "reinforce_pp",
        },
    ),
    "ppo": ("ppo", "local", {"batch.prompts": 8}),
    "ppo-two-ranks-sharded": (
        "ppo",
        "local",
        {"batch.prompts": 8, "placement.ranks": 2, "parallel.strategy": "fsdp2", "algorithm.minibatches": 2},
    ),
}
_UNSTABLE: Final = ("time", "tokens_per_s", "memory")  # parts of names whose figures differ between two equal runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare; the exit status is 1 if a case differs."""
    parser = argparse.ArgumentParser(prog="bench.golden", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("folder", type=Path, help="where the recording is")
    parser.add_argument("case", nargs="*", help=f"cases to run; all by default: {', '.join(CASES)}")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.folder.mkdir(parents=True, exist_ok=True)
    different = 0
    for name in options.case or CASES:
        file = options.folder / f"{name}.json"
        with tempfile.TemporaryDirectory(prefix="podium-golden-") as folder:
            found = run(name, Path(folder))
        if options.action == "record":
            file.write_text(json.dumps(found))
            sys.stdout.write(f"{name}: recorded\n")
            continue
        lines = list(differences(json.loads(file.read_text()), json.loads(json.dumps(found))))
        different += bool(lines)
        sys.stdout.write(
            f"{name}: {'differs' if lines else 'the same'}\n" + "".join(f"    {line}\n" for line in lines[:8])
        )
    return int(bool(different))


def run(name: str, folder: Path) -> dict[str, Any]:
    """Train one case below ``folder``; what is compared of it."""
    from podium.cli import main as podium

    recipe, backend, changes = CASES[name]
    data = folder / "copy.jsonl"
    rows = [{"prompt": f"{number:02d}=", "answer": f"{number:02d}"} for number in range(60)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {**COMMON, **changes, "run.dir": str(folder), "run.name": name, "data.train": str(data)}
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = podium(
            ["train", recipe, "--backend", backend, *(w if isinstance(w, str) else json.dumps(w) for w in words)]
        )
    if status:
        raise SystemExit(f"{name} ended with status {status}:\n{said.getvalue()}")
    return {
        "metrics": [_stable(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()],
        "completions": list(_completions(folder / name / "completions")),
        "weights": _digest(folder / name / "model" / "model.safetensors"),
    }


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two results of :func:`run`, one line each. A metric that is new is no difference."""
    if before["weights"] != after["weights"]:
        yield "the final weights differ"
    for kind in ("metrics", "completions"):
        if len(before[kind]) != len(after[kind]):
            yield f"{len(before[kind])} rows of {kind} became {len(after[kind])}"
        for number, (old, new) in enumerate(zip(before[kind], after[kind], strict=False)):
            for name in old:
                if old[name] != new.get(name):
                    values = f": {old[name]} became {new.get(name)}" if kind == "metrics" else ""
                    yield f"{kind} {number}, {name}{values}"


def _stable(line: str) -> dict[str, Any]:
    return {name: value for name, value in json.loads(line).items() if not any(part in name for part in _UNSTABLE)}


def _completions(folder: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    for file in sorted(folder.glob("*.parquet")):
        columns = pq.read_table(file).to_pydict()
        yield {
            name: [value.hex() if isinstance(value, float) else value for value in values]
            for name, values in columns.items()
        }


def _digest(weights: Path) -> str:
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(weights).items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    raise SystemExit(main())
