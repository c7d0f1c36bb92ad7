"""Completions that another run recorded, in place of a generator's: ``engine: {name: replay, options: {run: RUN}}``.

    RUN/completions/step-000012.parquet ─▶ collect of step 12 ─▶ learn

Tokens, log-probabilities, versions and rewards are those that RUN wrote. With its settings, a replay under the schedule
sync computes the same losses and weights to the last bit. Nothing is sampled, graded or evaluated.

Legend: B rows (completions), N tokens over all rows, K sampled tokens.
"""

from __future__ import annotations

import json
import math
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from podium.data import Batch, Jagged, fields
from podium.errors import ConfigError, DataError
from podium.models.vocabulary import find_text_ids
from podium.rewards import Grade
from podium.rollout.tasks import EncodedPrompts, Example, PromptStream
from podium.rollout.tasks.encode import TokenRows
from podium.runs.config import PPOConfig
from podium.runs.files import step_name
from podium.runs.paths import list_other_settings
from podium.runs.run_files import RunFiles
from podium.runs.run_reader import check_run
from podium.trainer.completion_files import LOGGED
from podium.trainer.completions import ScoredBatch, version_range
from podium.trainer.prompts import Prompt, Prompts

_RECORDED: Final = ("sampling", "data", "batch", "reward", "environment")  # sections that made what was recorded
_PROMPT: Final = ("group", "prompt", "prompt_tokens", "expected")
_ROW: Final = ("group", "prompt_tokens", "tokens", "token_logprobs", "token_versions", "reward", "correct")
_MISSING: Final = {
    "session": "has sessions of an environment, whose turns are recorded as text and not as tokens: replay a run "
    "without an environment",
    "token_kept": "has tokens that were drawn from sets of sampling.top_k or sampling.top_p, which are not recorded: "
    "replay a run that drew with sampling.top_k 0 and sampling.top_p 1",
}


class Replay:
    """What a run recorded of its steps 1 to ``run.steps``.

    Args:
        config: The configuration of the run that trains on it.
        tokenizer: Its tokenizer.

    Raises:
        ConfigError: There is no such run, it has other settings of what it recorded, a step is missing, or a column is
            not recorded. The message names it, and says what to do.
    """

    def __init__(self, config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.run = Path(config.engine.replayed_run)
        self._config, self._tokenizer = config, tokenizer
        check_run(self.run)
        if others := list_other_settings(config, self.run, _RECORDED):
            raise ConfigError(
                f"a replay trains what {self.run} recorded, and cannot change how that was made:\n  "
                + "\n  ".join(others)
                + "\nLeave these settings out"
            )
        self._files = RunFiles(self.run, "completions")
        self._tables = {step: self._read_prompts(step) for step in range(1, config.run.steps + 1)}
        if not self._tables:
            raise ConfigError("run.steps = 0 with a replay, which has no step to train on: raise run.steps")
        self.groups = {step: sorted({*table["group"]}) for step, table in self._tables.items()}

    def open_stream(self) -> PromptStream[Prompt]:
        """Return the prompts of all steps in their order. Raises ConfigError if they are those of other tokens."""
        examples, rows = list[Example](), list[list[int]]()
        for step, table in self._tables.items():
            firsts = {group: row for row, group in reversed([*enumerate(table["group"])])}
            for group in self.groups[step]:
                prompt, tokens, answer = (table[name][firsts[group]] for name in _PROMPT[1:])
                row = {"prompt": prompt, **({} if answer is None else {"answer": answer})}
                examples.append(Example(prompt, answer, row, place=f"{self.run}, step {step}, prompt {group}"))
                rows.append(tokens)
        self._tables.clear()
        ids = TokenRows(
            torch.tensor([token for row in rows for token in row], dtype=torch.int32),
            torch.tensor([0, *accumulate(map(len, rows))], dtype=torch.int64),
        )
        prompts = Prompts(examples, EncodedPrompts(ids, [*range(len(rows))], 0, 0, ids.digest), self._tokenizer)
        for prompt in prompts:
            if prompt.text.encode("utf-8", "replace").decode() != prompt.example.prompt:
                raise ConfigError(
                    f"{prompt.example.place}: its tokens mean {prompt.text[:60]!r} to this tokenizer, and meant "
                    f"{str(prompt.example.prompt)[:60]!r} to that of the run: set model.path and model.tokenizer to a "
                    "model with the same vocabulary"
                )
        return PromptStream[Prompt](prompts, self._config.run.seed, prompts.digest, shuffle=False)

    def read(self, step: int, prompts: Sequence[Prompt]) -> ScoredBatch:
        """Return what the run trained on in ``step``. ``prompts`` are those of the step, in their order."""
        table = self._read(step, None)
        rows = [row for row, reward in enumerate(table["reward"]) if reward is not None]  # None was left out
        table = {name: [column[row] for row in rows] for name, column in table.items()}
        prompt_lengths, lengths = ([*map(len, table[name])] for name in ("prompt_tokens", "tokens"))
        pairs = zip(table["prompt_tokens"], table["tokens"], strict=True)
        tokens = Jagged.from_rows([torch.tensor([*prompt, *sampled], dtype=torch.int64) for prompt, sampled in pairs])
        runs = torch.tensor([*zip(prompt_lengths, lengths, strict=True)], dtype=torch.int64)
        mask_N = torch.tensor([False, True]).repeat(len(rows)).repeat_interleave(runs.flatten())

        def spread(name: str, dtype: torch.dtype) -> Jagged:
            values_N = torch.zeros(len(mask_N), dtype=dtype)
            values_N[mask_N] = torch.tensor([value for row in table[name] for value in row], dtype=dtype)
            return tokens.like(values_N)

        batch = Batch(
            {
                fields.TOKENS: tokens,
                fields.LOSS_MASK: tokens.like(mask_N),
                fields.ROLLOUT_LOGPROBS: spread("token_logprobs", torch.float32),
                fields.VERSIONS: spread("token_versions", torch.int64),
                fields.GROUP: torch.tensor([bisect(self.groups[step], group) - 1 for group in table["group"]]),
                fields.FINISH_REASON: table["finish_reason"],
            },
            {"temperature": self._config.sampling.temperature},
        )
        if (text_ids := find_text_ids(self._config.model, self._tokenizer)) is not None:
            batch = batch.with_meta(text_ids=text_ids)
        batch = batch.with_columns({fields.VERSION_RANGE: version_range(batch)})
        scored = ScoredBatch(step=step, steps_before=step - 1, batch=batch, prompts=prompts, tokenizer=self._tokenizer)
        grades = [_read_grade(table, row) for row in range(len(rows))]
        rewards_B: Tensor = torch.tensor([grade.score for grade in grades], dtype=torch.float32)
        return scored.with_grades(grades, rewards_B)

    def _read_prompts(self, step: int) -> dict[str, list[Any]]:
        table = self._read(step, [*_PROMPT, "reward"])
        rows = [row for row, reward in enumerate(table["reward"]) if reward is not None]
        return {name: [column[row] for row in rows] for name, column in table.items()}

    def _read(self, step: int, columns: Sequence[str] | None) -> dict[str, list[Any]]:
        """Columns of a step's file. Raises ConfigError for what a replay needs and is not there."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        name = f"{step_name(step)}.parquet"
        where = f"{self.run}/completions/{name}"
        try:
            with self._files.open(name) as opened, pq.ParquetFile(opened) as file:
                _check_columns(where, {*file.schema_arrow.names})
                table: dict[str, list[Any]] = file.read(columns=None if columns is None else [*columns]).to_pydict()
                logged = json.loads((file.schema_arrow.metadata or {}).get(LOGGED.encode(), b"[]"))
        except FileNotFoundError:
            raise self._refuse(step) from None
        except ConfigError:  # which is a ValueError
            raise
        except (pa.ArrowException, OSError, ValueError, DataError) as error:
            raise ConfigError(f"{where} cannot be read: {error}; it cannot be replayed") from error
        if any(reward is not None and math.isnan(reward) for reward in table["reward"]):
            raise ConfigError(f"{where} has completions that were not graded, so that the step trained nothing")
        return {**table, LOGGED: [frozenset[str](logged)] * len(table["reward"])}

    def _refuse(self, step: int) -> ConfigError:
        steps = self._config.run.steps
        remedy = f"set run.steps to {step - 1}" if step > 1 else "replay a run that has trained"
        return ConfigError(
            f"run.steps = {steps}, and {self.run} has not recorded step {step}, or its file was removed "
            f"(completions/{step_name(step)}.parquet): {remedy}"
        )


def _check_columns(where: str, stored: set[str]) -> None:
    """Check that a file's columns are those of a run that can be replayed. Raises ConfigError."""
    for column, reason in _MISSING.items():
        if column in stored:
            raise ConfigError(f"{where} cannot be replayed; it {reason}")
    if missing := [column for column in (*_PROMPT, *_ROW, "finish_reason") if column not in stored]:
        raise ConfigError(
            f"{where} has no column {missing[0]!r}, which older versions of Podium did not record: run it again"
        )


def _read_grade(table: dict[str, list[Any]], row: int) -> Grade:
    parts = {
        name.removeprefix("reward_"): column[row]
        for name, column in table.items()
        if name.startswith("reward_") and column[row] is not None
    }
    texts = {
        name.removeprefix("logged_"): column[row]
        for name, column in table.items()
        if name.startswith("logged_") and column[row] is not None
    }
    return Grade(table["reward"][row], parts, table["correct"][row], extra=texts, logged=table[LOGGED][row])
