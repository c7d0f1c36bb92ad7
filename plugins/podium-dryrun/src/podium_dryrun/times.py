"""What a dry run measures: a micro-step and a decoding step on the real configuration, and the time that follows.

    roles start as in the run ─▶ generate: prompts, and a few tokens ─▶ update: one micro-batch, and two ─▶ arithmetic

The weights that the measured steps change end with the workers. What is written goes to a directory that is removed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Final, TypeAlias, cast

import torch

from podium.data import Batch, Jagged, fields
from podium.errors import PodiumError
from podium.runs.config import PPOConfig, SFTConfig
from podium.runtime import Call, connect
from podium.spelling import write_count
from podium.telemetry.formatting import duration
from podium.trainer.ppo import PPOTrainer
from podium.trainer.preload import PRELOAD
from podium.trainer.prompts import HeldOut, completion_seeds, pair_batch, prompt_batch
from podium.trainer.roles import Roles, start_roles
from podium.trainer.run_setup import RunData
from podium.trainer.trainer import Trainer
from podium_dryrun.data import count_row_tokens, count_tokens

__all__ = ["describe_times"]

_DECODED: Final = 8  # tokens after the first one
_FORWARD: Final = 1 / 3  # of a micro-step: the forward pass without the backward pass
_NOTHING_S: Final = 1e-3  # of a pass that this configuration does not need

AnyTrainer: TypeAlias = Trainer[Any, Any, Any]
Lines: TypeAlias = Iterator[tuple[str, str]]
_Row: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass
class _Times:
    """What was measured, in seconds.

    Attributes:
        lines: What was measured and what could not be, as text.
        passes: Seconds of each pass over a micro-batch on all ranks, by name; the update's is without ``optimizer``.
        optimizer: Seconds of an optimizer step.
        tokens: Tokens of that micro-batch.
        prefill: Seconds until each of ``sequences`` completions has its first token.
        decoding: Seconds of each further token of these.
    """

    lines: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    passes: dict[str, float] = field(default_factory=dict[str, float])
    optimizer: float = 0.0
    tokens: int = 0
    sequences: int = 0
    prefill: float = 0.0
    decoding: float | None = None

    def generate(self, rows: int, sampled: int) -> float:
        """Seconds for completions of ``sampled`` tokens, as many at a time as were timed."""
        return -(-rows // self.sequences) * (self.prefill + sampled * (self.decoding or 0.0))

    def learn(self, config: PPOConfig | SFTConfig, length: float) -> float:
        """Seconds for the passes of a step over rows of ``length`` tokens, and its optimizer steps."""
        if isinstance(config, PPOConfig):
            rows, epochs, updates = config.rows, config.algorithm.epoch_choice.count, config.algorithm.updates
        else:
            rows, epochs, updates = config.batch.examples, 1, 1
        per_token = {name: seconds / self.tokens for name, seconds in self.passes.items()}
        update = per_token.pop("update") * epochs
        return rows * length * (sum(per_token.values()) + update) + updates * self.optimizer

    def evaluate(self, config: PPOConfig | SFTConfig, held_out: Mapping[str, HeldOut], sampled: int) -> float | None:
        """Seconds for an evaluation; None if nothing that was timed says it."""
        if isinstance(config, PPOConfig):
            rows = sum(len(items) for items in held_out.values())
            return self.generate(rows, sampled) if self.decoding is not None and not config.environment.name else None
        if not (config.scores_answers and self.tokens):
            return None
        tokens = sum(count_row_tokens(items) for items in held_out.values())
        return tokens * self.passes.get("values", _FORWARD * self.passes["update"]) / self.tokens


def describe_times(trainer: AnyTrainer, data: RunData[Any]) -> str:
    """Start the workers of a run, time a micro-step and a decoding step, and return what follows of it, as text.

    Args:
        trainer: The trainer of the run, which does not train.
        data: What its ``read_data`` returns.

    Raises:
        PodiumError: The run would be refused: its workers cannot start, or there is no room for them.
    """
    config = replace(data.config, run=replace(data.config.run, profile=()))
    lengths, times, options = count_tokens(data), _Times(), trainer.options
    with tempfile.TemporaryDirectory(prefix="podium-measure-") as folder, ExitStack() as stack:
        cluster = options.cluster
        if isinstance(cluster, str):
            hints = {"log_dir": folder, "preload": PRELOAD}
            cluster = stack.enter_context(connect(cluster, hints=hints, **options.backend_options))
        begun_s = time.monotonic()
        roles = stack.enter_context(start_roles(cluster, config, options.workers))
        times.lines.append(("start", f"{duration(time.monotonic() - begun_s)} until all workers had their models"))
        if isinstance(config, PPOConfig) and roles.generators:
            _try(times, "decoding step", lambda: _time_decoding(times, roles, config, data, lengths))
        _try(times, "micro-step", lambda: _time_learning(times, roles, config, data, trainer, lengths))
    lines = (*times.lines, *_conclude(times, config, data, lengths))
    return "\n".join(["# time", *(f"{name:<12} {text}" for name, text in lines)])


def _try(times: _Times, what: str, measure: Callable[[], None]) -> None:
    try:
        measure()
    except PodiumError as error:
        first_line = str(error).partition("\n")[0]
        times.lines.append((what, f"could not be timed: {first_line}"))


def _seconds(work: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


# -- decoding ----------------------------------------------------------------------------------------------------------


def _time_decoding(
    times: _Times, roles: Roles, config: PPOConfig, data: RunData[Any], lengths: Sequence[int] | None
) -> None:
    """Time the first token of as many completions as are drawn at the same time, and further ones."""
    assert roles.weight_sync is not None
    roles.weight_sync.sync(0, list(roles.generators))
    ranks = sum(handle.group.world_size for handle in roles.generators)
    most = config.engine.max_sequences * ranks
    count = -(-min(config.rows, most) // config.sampling.n)
    if lengths is None:
        heads = [torch.randint(len(data.tokenizer), (config.data.max_prompt_tokens,)) for _ in range(count)]
        columns = {fields.PROMPT_TOKENS: Jagged.from_rows(heads), fields.GROUP: torch.arange(count)}
        prompts = Batch({**columns, fields.SEED: completion_seeds(0, 0, count, config.sampling.n)})
    else:
        seeds = completion_seeds(config.run.seed, 0, count, config.sampling.n)
        prompts = prompt_batch(data.stream.take(count), seeds)
    more = min(_DECODED, data.sampling.max_new_tokens - 1)
    cuts = [at * count // len(roles.generators) for at in range(len(roles.generators) + 1)]

    def draw(tokens: int) -> None:
        sampling = replace(data.sampling, max_new_tokens=tokens, stop_token_ids=())
        calls: list[Call[Batch]] = [
            handle.generate.submit(prompts.slice(*cuts[at : at + 2]), sampling)
            for at, handle in enumerate(roles.generators)
            if cuts[at] < cuts[at + 1]
        ]
        for call in calls:
            call.result()

    draw(1 + more)  # the first call also prepares the engine
    times.sequences = count * config.sampling.n
    first = _seconds(lambda: draw(1))
    if more:
        times.decoding = max(0.0, _seconds(lambda: draw(1 + more)) - first) / more
    times.prefill = max(0.0, first - (times.decoding or 0.0))
    each = f"{duration(times.decoding or first)} a step of {write_count(times.sequences, 'completion')} at a time"
    times.lines.append(("decoding", f"{each}, {duration(times.prefill)} for their prompts"))


# -- learning ----------------------------------------------------------------------------------------------------------


def _time_learning(
    times: _Times,
    roles: Roles,
    config: PPOConfig | SFTConfig,
    data: RunData[Any],
    trainer: AnyTrainer,
    lengths: Sequence[int] | None,
) -> None:
    """Time the passes over one micro-batch a rank, and the update of two, from which the optimizer's part follows."""
    ranks = roles.policy.group.world_size
    if isinstance(trainer, PPOTrainer):
        rows = _take_rows(trainer, data, ranks, lengths)
    else:
        rows = _take_examples(trainer, data, ranks)
    passes = _list_passes(roles, trainer)
    updated = config.rows // config.algorithm.minibatches if isinstance(config, PPOConfig) else config.batch.examples
    spent: list[dict[str, float]] = []
    parts = (rows, rows, [*rows, *rows]) if len(rows) < updated else (rows, rows)
    for part in parts:  # the first time also prepares what the second one measures
        value: Any = _join(trainer, part)
        spent.append({})
        for name, work in passes.items():
            begun_s = time.perf_counter()
            value = work(value)
            spent[-1][name] = time.perf_counter() - begun_s
    single, update_s = spent[1], spent[1]["update"]
    if len(parts) > 2:
        times.optimizer = min(update_s / 2, max(0.0, 2 * update_s - spent[2]["update"]))
    times.passes = {**single, "update": update_s - times.optimizer}
    tokens = _tokens_of(_join(trainer, rows))
    times.tokens = len(tokens.values)
    passed = ", ".join(f"{name} {duration(seconds)}" for name, seconds in times.passes.items() if seconds > _NOTHING_S)
    rows, size = write_count(len(tokens.lengths), "row"), write_count(times.tokens, "token")
    what = f"{rows} of {size} on {write_count(ranks, 'rank')}"
    stepped = f"; optimizer step {duration(times.optimizer)}" if len(parts) > 2 else ", with its optimizer step"
    times.lines.append(("micro-step", f"{what}: {passed}{stepped}"))


def _take_rows(trainer: PPOTrainer, data: RunData[Any], ranks: int, lengths: Sequence[int] | None) -> list[_Row]:
    """Prompts of the data with random completions of the greatest length, as many as fill a micro-batch a rank."""
    config, sampled, size = trainer.config, data.sampling.max_new_tokens, len(data.tokenizer)
    most, rows, tokens = ranks * config.parallel.counted_tokens, list[_Row](), 0
    dice = torch.Generator().manual_seed(config.run.seed)
    while len(rows) < config.rows // config.algorithm.minibatches:
        if lengths is None:
            prompt = torch.randint(size, (config.data.max_prompt_tokens,), generator=dice)
        else:
            prompt = data.stream.take(1)[0].token_ids
        tokens += len(prompt) + sampled
        if tokens > most and len(rows) >= ranks:
            break
        rows.append((prompt, torch.randint(size, (sampled,), generator=dice)))
    return rows


def _take_examples(trainer: AnyTrainer, data: RunData[Any], ranks: int) -> list[Any]:
    """Examples of the data, as many as fill a micro-batch a rank."""
    config, rows, tokens = trainer.config, list[Any](), 0
    while len(rows) < config.batch.examples:
        (row,) = data.stream.take(1)
        tokens += trainer.count_tokens(row)
        if tokens > ranks * config.parallel.counted_tokens and len(rows) >= ranks:
            break
        rows.append(row)
    return rows


def _join(trainer: AnyTrainer, rows: Sequence[Any]) -> Any:
    """What the passes of a recipe take."""
    if not isinstance(trainer, PPOTrainer):
        return trainer.join_rows(rows, 1)
    n, config = trainer.config.sampling.n, trainer.config
    batch = pair_batch([([*prompt, *text], [False] * len(prompt) + [True] * len(text)) for prompt, text in rows])
    mask = batch.jagged(fields.LOSS_MASK)
    signs = torch.cat([torch.full((int(length),), (-1.0) ** row) for row, length in enumerate(mask.lengths)])
    columns = {
        fields.GROUP: torch.arange(len(rows)) // n,
        fields.FINISH_REASON: ["length"] * len(rows),
        fields.ADVANTAGES: mask.like(signs * mask.values),
        fields.ROLLOUT_LOGPROBS: mask.like(torch.zeros(len(signs))),
        fields.RETURNS: mask.like(torch.zeros(len(signs))),
    }
    meta = {"temperature": config.sampling.temperature, "max_new_tokens": config.sampling.max_new_tokens}
    return batch.with_columns(columns).with_meta(**meta)


def _tokens_of(value: Any) -> Jagged:
    batch: Batch = value if isinstance(value, Batch) else value.batch
    return batch.jagged(fields.TOKENS)


def _list_passes(roles: Roles, trainer: AnyTrainer) -> dict[str, Callable[[Any], Any]]:
    """The passes of a step over its rows, in their order; each returns what the next one takes."""
    trainer.run = cast("Any", SimpleNamespace(roles=roles, sessions=None))  # all that the stages read of a run
    if isinstance(trainer, PPOTrainer):

        def update(batch: Batch) -> list[Any]:
            learners = [roles.policy, *([roles.critic] if roles.critic is not None else [])]
            return [call.result() for call in [learner.update.submit(batch) for learner in learners]]

        return {"log-probabilities": trainer.logprobs, "values": trainer.values, "update": update}
    return trainer.list_passes()


# -- the time that follows ---------------------------------------------------------------------------------------------


def _conclude(times: _Times, config: PPOConfig | SFTConfig, data: RunData[Any], lengths: Sequence[int] | None) -> Lines:
    """What was assumed, and how long a step and the run take."""
    sampled = data.sampling.max_new_tokens
    mean = sum(lengths) / len(lengths) if lengths else config.data.max_prompt_tokens
    halves: dict[str, float] = {}
    if isinstance(config, PPOConfig):
        what = f"completions of {sampled:,} tokens, the most allowed, after prompts of {mean:,.0f}, "
        what += "their mean" if lengths else "the most allowed"
        if config.environment.name:
            yield "not timed", f"sessions of {config.environment.name}, whose turns and tools only a run shows"
        elif config.replays:
            yield "not timed", "completions, which are read from records"
        elif times.decoding is not None:
            halves["to generate"] = times.generate(config.rows, sampled)
    else:
        what = f"examples of {mean:,.0f} tokens, their mean"
    if times.tokens:
        halves["to learn"] = times.learn(config, mean + sampled if isinstance(config, PPOConfig) else mean)
    yield "assumed", f"{what}; no time for rewards, new weights, checkpoints"
    complete = "to learn" in halves and ("to generate" in halves or not isinstance(config, PPOConfig))
    if not halves:
        return
    beside = config.run.staleness != 0 if isinstance(config, PPOConfig) else False
    step_s = max(halves.values()) if beside else sum(halves.values())
    parts = ", ".join(f"{duration(seconds)} {name}" for name, seconds in halves.items())
    joined = f", side by side with run.schedule = {config.run.schedule}" if beside and len(halves) > 1 else ""
    yield "a step", f"{'about' if complete else 'at least'} {duration(step_s)}: {parts}{joined}"
    evaluation, total_s = "", config.run.steps * step_s
    if data.held_out is not None:
        evaluation_s = times.evaluate(config, data.held_out, sampled)
        count = config.eval.at_start + _count_after(config)
        if evaluation_s is None:
            evaluation = f", and {write_count(count, 'evaluation')}, not counted: nothing like them was timed"
        else:
            evaluation = f", and {write_count(count, 'evaluation')} of about {duration(evaluation_s)}"
            total_s += count * evaluation_s
    about = "about" if complete else "at least"
    yield "the run", f"{about} {duration(total_s)}: {write_count(config.run.steps, 'step')}{evaluation}"


def _count_after(config: PPOConfig | SFTConfig) -> int:
    """The number of evaluations after steps."""
    every = config.eval.every or config.run.steps
    return -(-config.run.steps // max(1, every))
