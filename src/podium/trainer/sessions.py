"""The sessions of a run, as the trainer uses them. A package of the group ``podium.sessions`` runs them:
:class:`podium.rollout.environments.SessionPackage`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from podium.data import Batch
    from podium.rewards import Grader, RewardConfig
    from podium.rollout.sampling import SamplingParams
    from podium.runtime import Handle
    from podium.trainer.completions import ScoredBatch
    from podium.trainer.prompts import Prompt
    from podium.workers import RewardModel


class Sessions(Protocol):
    """The rollout workers, as one."""

    def serve(self, number: int) -> None:
        """Let a new or restarted generator answer requests."""
        ...

    def leave_out(self, number: int) -> None:
        """Send no more requests to a generator that was left out of the run."""
        ...

    def live(
        self,
        prompts: Sequence[Prompt],
        seeds: torch.Tensor,
        sampling: SamplingParams,
        step: int,
        *,
        training: bool = True,
    ) -> Batch:
        """Run ``n`` sessions for each prompt's task.

        Args:
            prompts: P tasks.
            seeds: A seed for each session, int64 ``[P, n]``.
            sampling: Sampling parameters.
            step: The training step of the sessions.
            training: Whether the sessions are for training, and not for an evaluation.

        Returns:
            The rows of the sessions that did not fail, whose tensors are references.

        Raises:
            NoRowsError: All sessions failed, and the message has the reasons; or no session has asked the model.
        """
        ...

    def describe(self, step: int) -> Mapping[str, float]:
        """Return the metrics of all training sessions of ``step``, of each of its draws, by name. A second call returns
        nothing."""
        ...

    def grade(
        self, scored: ScoredBatch, grader: Grader, reward: RewardConfig, reward_model: Handle[RewardModel] | None = None
    ) -> ScoredBatch:
        """Return ``scored`` with the grades of the environment, or with the reward's grades for rows that have none.

        Raises:
            RewardError: The reward failed.
        """
        ...
