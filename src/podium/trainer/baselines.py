"""The rewards of greedy completions, which an advantage estimator may declare as baselines (``needs_greedy``).

    prompts ──▶ sampling.n completions ──▶ graded ──▶ trained
       └──────▶ one, at temperature 0  ──▶ graded ──▶ ``baseline`` of the prompt's rows, and no more

The greedy completion is drawn after the others, by a request of its own: a generator draws all rows of a request at one
temperature. It is no row of the step: it is neither trained nor kept, and counts in no other statistic.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from podium.data import fields
from podium.errors import RewardError
from podium.rollout.sampling import SamplingParams
from podium.spelling import write_count
from podium.trainer.completions import ScoredBatch


def be_greedy(sampling: SamplingParams) -> SamplingParams:
    """One completion a prompt, of the most probable tokens."""
    return replace(sampling, n=1, temperature=0.0, top_p=1.0, top_k=0)


def add_baselines(scored: ScoredBatch, greedy: ScoredBatch, ranks: int) -> tuple[ScoredBatch, Sequence[int]]:
    """Return ``scored`` with the column ``baseline``, and the prompts that lack one, whose rows are left out.

    Args:
        greedy: A graded completion of each prompt, without those that the reward left out.
        ranks: The fewest rows that the policy can train on.

    Raises:
        RewardError: Fewer rows have a baseline.
    """
    baselines = dict(zip(greedy.groups, greedy.rewards_B.tolist(), strict=True))
    rows = [row for row, group in enumerate(scored.groups) if group in baselines]
    missing = sorted({*scored.groups} - baselines.keys())
    if len(rows) < min(ranks, len(scored.groups)):
        raise RewardError(
            f"step {scored.step}: the reward returned None for the greedy completions of "
            f"{write_count(len(missing), 'prompt')}. Without this baseline the others are not trained, and "
            f"{write_count(len(rows), 'completion is', 'completions are')} left to train on: return a number for "
            "every completion, or choose an estimator without such a baseline"
        )
    scored = scored.with_rows(rows) if missing else scored
    column = torch.tensor([baselines[group] for group in scored.groups], dtype=torch.float32)
    return replace(scored, batch=scored.batch.with_columns({fields.BASELINE: column})), missing
