"""What a step takes of the controller's memory when its batch grows: `python -m bench.controller_memory`.

A GRPO run with a KL in the reward and four updates a step, in one process of its own with its workers on the backend
`local`. Every few steps the batch is ten times as large, first by longer completions, then, in a second run, by more of
them. Only memory is measured, so the workers make up completions and log-probabilities instead of computing them; what
they are sent and what they return is the real thing. A row is the peak of the controller's resident memory during the
steps of one size, less what it held before the first of them all; beside it the peak of the largest worker.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from bench.census import PROC, descendants
from bench.measure import Row
from bench.podium_grpo import config_of
from bench.workload import StepLoad
from podium.algorithms import AlgorithmConfig
from podium.data import Batch, Jagged, fields
from podium.data.sampled_text import decode_sampled, text_column
from podium.rollout.sampling import SamplingParams
from podium.runtime import concat, endpoint, first, shard
from podium.telemetry.metrics import TOKENS
from podium.trainer import GRPOConfig, PPOTrainer
from podium.trainer.completions import ScoredBatch
from podium.workers import Generator, Policy, Reference

SCALES = (1, 10, 100)
STEPS = 3  # of each size, after as many of the smallest to warm up
MIB = 1 << 20
SELF = "self"
RESET_PEAK = "5"  # written to clear_refs: see proc(5)


class MadeUp(Generator):
    """Random completions of full length."""

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat(), returns=Generator.generate.spec.returns)
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        heads = prompts.jagged(fields.PROMPT_TOKENS).unbind()
        new, rows = sampling.max_new_tokens, [head for head in heads for _ in range(sampling.n)]
        tokens = Jagged.from_rows([torch.cat([head, torch.randint(4, 64, (new,))]) for head in rows])
        mask = tokens.like(torch.cat([torch.arange(len(head) + new) >= len(head) for head in rows]))
        batch = Batch(
            {
                fields.TOKENS: tokens,
                fields.LOSS_MASK: mask,
                fields.ROLLOUT_LOGPROBS: tokens.like(-torch.rand(len(tokens.values)) * mask.values),
                fields.VERSIONS: tokens.like(torch.zeros_like(tokens.values)),
                fields.GROUP: prompts.dense(fields.GROUP).repeat_interleave(sampling.n),
                fields.FINISH_REASON: ["length"] * len(rows),
            },
            {"temperature": sampling.temperature},
        )
        return batch.with_columns({fields.TEXT: text_column(decode_sampled(batch, self._tokenizer))})


class Idle(Policy):
    """Learns nothing; reads all it is sent."""

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=concat(), returns=Policy.logprobs.spec.returns)
    def logprobs(self, batch: Batch, entropy: bool = False, squares: bool = False) -> Batch:
        columns = (fields.OLD_LOGPROBS, fields.ENTROPY)
        return Batch(dict.fromkeys(columns, _logprobs(batch)), batch.meta)

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=first())
    def update(self, batch: Batch) -> dict[str, float]:
        batch = self.weighted(batch)
        columns = [batch[name] for name in batch]
        return {"loss": sum(float(column.values.sum()) for column in columns if isinstance(column, Jagged))}


class IdleReference(Reference):
    @endpoint(
        dispatch=shard(args=("batch",), balance="tokens"), collect=concat(), returns=Reference.logprobs.spec.returns
    )
    def logprobs(self, batch: Batch) -> Batch:
        return Batch({fields.REF_LOGPROBS: _logprobs(batch)}, batch.meta)


def _logprobs(batch: Batch) -> Jagged:
    mask = batch.jagged(fields.LOSS_MASK)
    return mask.like(-torch.rand(len(mask.values)) * mask.values)


class Growing(PPOTrainer):
    """Its batches grow as it goes, in `by`: "length" or "rows". Prints a row for each size."""

    by = "length"

    def collect(self, step: int) -> ScoredBatch:
        phase, number = divmod(step - 1 - STEPS, STEPS)  # the first steps, which warm up, are phase -1
        if number == 0 and phase >= 0:
            self._begin(phase)
        return super().collect(step)

    def learn(self, scored: ScoredBatch) -> Mapping[str, float]:
        phase, number = divmod(scored.step - 1 - STEPS, STEPS)
        metrics = super().learn(scored)
        self.completions.flush()
        if number == STEPS - 1 and phase >= 0:
            self._end(phase, int(metrics[TOKENS]))
        return metrics

    def _begin(self, phase: int) -> None:
        if phase == 0:
            self._sampling, self._before = self.run.data.sampling, resident(SELF, "VmRSS")
        tokens, rows = self._sampling.max_new_tokens, self._sampling.n
        grown = {"max_new_tokens": tokens * SCALES[phase]} if self.by == "length" else {"n": rows * SCALES[phase]}
        sampling = replace(self._sampling, **grown)
        self.run = replace(self.run, data=replace(self.run.data, sampling=sampling))
        self._others = [str(pid) for pid in descendants(os.getpid())]
        for pid in (SELF, *self._others):
            (PROC / pid / "clear_refs").write_text(RESET_PEAK)

    def _end(self, phase: int, tokens: int) -> None:
        own = (resident(SELF, "VmHWM") - self._before) / MIB
        worker = max(resident(pid, "VmHWM") for pid in self._others) / MIB
        name = f"controller_memory_{self.by}_{SCALES[phase]}x"
        quartiles, floor = (own, own), "0: a controller that keeps nothing"
        row = Row(
            name=name,
            unit="MiB",
            median=own,
            quartiles=quartiles,
            better="lower",
            floor=floor,
            others={"worker": worker},
        )
        sys.stdout.write(json.dumps({**row.as_json(), "tokens": tokens}) + "\n")
        sys.stdout.flush()


def resident(pid: str, figure: str) -> int:
    """Bytes: `VmRSS` now, `VmHWM` at most since the peak was reset."""
    lines = (PROC / pid / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{figure}:"))


def config(folder: Path) -> GRPOConfig:
    whole = config_of(StepLoad(), folder)
    algorithm = AlgorithmConfig(kl_in="reward", kl_coef=0.1, epochs=2, minibatches=2, max_mismatch=None)
    run = replace(whole.run, steps=STEPS * (1 + len(SCALES)))
    return replace(whole, run=run, algorithm=algorithm)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.controller_memory", description=__doc__)
    parser.add_argument("--by", choices=("length", "rows"), default="length", help="what grows")
    Growing.by = parser.parse_args().by
    workers = {"generator": MadeUp, "policy": Idle, "reference": IdleReference}
    with tempfile.TemporaryDirectory(prefix="podium-bench-") as folder:
        Growing(config(Path(folder)), workers=workers, show=False).fit()


if __name__ == "__main__":
    main()
