"""Dynamic sampling: prompts whose completions are all equally good are dropped, and others are drawn in their place.

    first draw     batch.prompts prompts ─▶ graded ─┬─▶ groups that differ ───────────▶ trained
    further draws  as many as were dropped ◀────────┘ groups whose rewards are equal ─▶ dropped

A group whose rewards are all equal has no signal for an advantage that compares the completions of a prompt, or whose
parts of rewards, or rewards of turns, are equal where it compares these. Yu et al. 2025, DAPO, arXiv:2503.14476,
section 3.2, draw until a batch is full. Here the number of further draws has a bound: after it the step trains with the
groups that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import torch

from podium.algorithms import ADVANTAGES, AlgorithmConfig
from podium.algorithms.compared import find_flat, stack_parts
from podium.data import fields
from podium.runs.sections import PromptChoice
from podium.telemetry import metrics as names
from podium.telemetry.formatting import percent
from podium.trainer import step_columns as columns
from podium.trainer.completions import ScoredBatch
from podium.trainer.prompts import Prompt
from podium.workers.estimator import Trajectories


def list_flat(scored: ScoredBatch, by: str, algorithm: AlgorithmConfig | None = None) -> set[int]:
    """Return the groups whose rows are all equally good. Of sessions with several agents, the rows of each agent are
    compared with one another, as an advantage compares them.

    Args:
        by: What is compared: the rewards, or whether completions are correct, by :meth:`.ScoredBatch.is_correct`.
        algorithm: Its estimator says what it compares of the rewards: these as a whole by default.
    """
    batch, groups = scored.batch, scored.groups
    compares = "rewards" if algorithm is None else ADVANTAGES.declaration(algorithm.advantage).compares
    if by == "rewards" and compares == "turns" and algorithm is not None and fields.TURN in batch:
        tokens = columns.select(batch, (*columns.FIGURE_INPUTS, fields.TURN)).fetch()
        trajectories = Trajectories.of(tokens)
        flat_B = trajectories.find_flat(tokens, algorithm)[trajectories.trajectory_B]
    else:
        agents = batch.python(fields.AGENT) if fields.AGENT in batch else [""] * len(groups)
        codes = {key: code for code, key in enumerate(dict.fromkeys(zip(groups, agents, strict=True)))}
        group_B = torch.tensor([codes[key] for key in zip(groups, agents, strict=True)], dtype=torch.int64)
        flat_B = find_flat(_list_compared(scored, by, algorithm if compares == "parts" else None), group_B)
    return {*groups} - {group for group, flat in zip(groups, flat_B.tolist(), strict=True) if not flat}


def _list_compared(scored: ScoredBatch, by: str, algorithm: AlgorithmConfig | None) -> torch.Tensor:
    """The verdict of each row, the parts of its reward that ``algorithm`` learns, or its whole reward, ``[B, C]``."""
    rewards = sum_rewards(scored)
    if by != "rewards":
        rewards = [float(scored.is_correct(row, reward)) for row, reward in enumerate(rewards)]
    elif algorithm is not None and (names := [name for name in scored.batch if name.startswith(fields.PART)]):
        return stack_parts({name.removeprefix(fields.PART): scored.batch.dense(name) for name in names}, algorithm)
    return torch.tensor(rewards, dtype=torch.float64)[:, None]


def fill_step(
    first: ScoredBatch,
    draw: Callable[[int], ScoredBatch | None],
    choice: PromptChoice,
    least: int,
    algorithm: AlgorithmConfig | None = None,
) -> tuple[ScoredBatch, list[int]]:
    """Drop the flat groups of a step, and draw other prompts in their place.

    Args:
        first: The graded completions of the first draw.
        draw: Draws this many further prompts and grades them. Their groups go on where those before ended. None means
            that no completion of them was scored.
        choice: The entries of ``batch.prompts``.
        least: The fewest rows that the policy can train on. If too few groups differ, flat ones stay.
        algorithm: Its estimator says what it compares of the rewards, as in :func:`list_flat`.

    Returns:
        The rows to train on, with figures of what was dropped, and the groups that were dropped.
    """
    parts, flat, draws = [first], list_flat(first, choice.filter, algorithm), 0
    mixed = len({*first.groups} - flat)
    while mixed < choice.count and draws < choice.refills:
        draws += 1
        part = draw(choice.count - mixed)
        if part is None or not len(part.batch):
            continue
        flat_part = list_flat(part, choice.filter, algorithm)
        parts.append(part)
        flat |= flat_part
        mixed += len({*part.groups} - flat_part)
    step_rows = _join(parts)
    groups = {*step_rows.groups}
    kept = groups - flat
    for group in sorted(flat):
        if sum(map(kept.__contains__, step_rows.groups)) >= least:
            break
        kept.add(group)
    dropped = sorted(groups - kept)
    figures = {
        names.FILTER_DROPPED: len(flat) / len(groups),
        names.FILTER_REWARD: fmean(map(sum_rewards(step_rows).__getitem__, step_rows.firsts)),
        names.FILTER_REFILLS: float(draws),
        names.FILTER_MISSING: float(max(0, choice.count - mixed)),
    }
    rows = [row for row, group in enumerate(step_rows.groups) if group in kept]
    trained = step_rows if len(rows) == len(step_rows.groups) else step_rows.with_rows(rows)
    if names.SESSIONS_TRAINED in trained.figures:
        figures[names.SESSIONS_TRAINED] = float(len(trained.firsts))
        figures[names.SESSIONS_ROWS] = float(len(trained.batch))
    return replace(trained, figures={**trained.figures, **figures}), dropped


def sum_rewards(scored: ScoredBatch) -> list[float]:
    """The whole reward of each row: in a session, with the rewards of its turns."""
    rewards = scored.rewards_B.tolist()
    if fields.GRADE not in scored.batch:
        return rewards
    return [reward + earned.of_turns for reward, earned in zip(rewards, scored.batch.python(fields.GRADE), strict=True)]


def explain_flat(metrics: Mapping[str, float], max_new_tokens: int) -> str:
    """Say for a note why a step of flat groups taught nothing, and what to do."""
    cut = metrics.get(names.TRUNCATED, 0.0)
    remedy = (
        f"{percent(cut)} of the completions were cut off at sampling.max_new_tokens = {max_new_tokens}: raise it"
        if cut > 0.5
        else "look at completions (run.show_samples, or completions/ in the run's directory), and take prompts "
        "that the model answers now and then, or warm it up with podium train sft"
    )
    what = f"all completions of a prompt got the same reward (mean {metrics.get(names.REWARD_MEAN, 0.0):.3g})"
    if metrics.get(names.LEFT_OUT) == 1.0:
        what = "all completions were left out (algorithm.cut_off)"
    return f"{what}; {remedy}"


def _join(parts: Sequence[ScoredBatch]) -> ScoredBatch:
    """Join the draws of a step. Sessions and trajectories are numbered through all of them."""
    if len(parts) == 1:
        return parts[0]
    numbered, starts = list[ScoredBatch](), dict.fromkeys((fields.SESSION, fields.TRAJECTORY), 0)
    for part in parts:
        columns: dict[str, torch.Tensor] = {}
        for name in starts:
            if name in part.batch and len(part.batch):
                columns[name] = part.batch.dense(name) + starts[name]
                starts[name] = int(columns[name].max()) + 1
        numbered.append(replace(part, batch=part.batch.with_columns(columns)) if columns else part)
    prompts: Sequence[Prompt] = max((part.prompts for part in parts), key=len)
    joined = ScoredBatch.join(numbered)
    left_out = None if joined.left_out is None else replace(joined.left_out, prompts=prompts)
    return replace(joined, prompts=prompts, left_out=left_out)
