"""The estimator: advantages and metrics that need all completions of a step at once.

Legend: B rows (completions) of a step, N tokens over all of them, R trajectories. A trajectory is a row, or adjacent
rows of one agent in one session of an environment. It is rewarded as a whole, and compared with others as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from podium.algorithms import (
    ADVANTAGES,
    AdvantageInputs,
    AlgorithmConfig,
    check_functions,
    compute_advantages,
    kl_estimate,
    loss_weights,
    penalize,
)
from podium.algorithms.compared import find_flat, list_compared
from podium.algorithms.token_rows import group_statistics, row_sums, rows_of_tokens
from podium.data import Batch, Jagged, fields
from podium.data.sampled_text import count_sampled
from podium.runtime import Worker, concat, endpoint, first, only, shard
from podium.telemetry import metrics
from podium.workers.learner import LEFT_OUT


class Estimator(Worker):
    """Computes advantages and metrics of the whole batch of a step. It holds no model.

    Only the first rank is called, with all rows, because groups, whitening and a user's own advantage need the whole
    batch. They cost a few operations a token, less than collectives would. Tensors arrive by reference and results stay
    with the worker, so the controller's traffic grows with rows, not with tokens.

    Args:
        algorithm: The estimator of advantages and its constants.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        check_functions(algorithm)
        self.algorithm = algorithm.resolve()

    @endpoint(dispatch=shard(), collect=concat(), returns="ref", concurrent=True)
    def keep(self, batch: Batch) -> Batch:
        """Copy a generator's tensors into these processes, so that they outlive the generator."""
        return batch

    @endpoint(dispatch=only(0), collect=first(), returns="ref")
    def advantages(self, batch: Batch, kl_coef: float = 0.0) -> Batch:
        """Compute the token columns ``advantages`` and, where a critic is trained, ``returns``, and those of the user's
        own that the estimator returns.

        With ``algorithm.cut_off = "leave_out"`` also compute ``left_out``, bool ``[B]``: the rows of completions and
        trajectories that were cut off. Their rewards count in the statistics of their groups, as in TRL's
        ``mask_truncated_completions`` and in the overlong filtering of Yu et al. 2025, "DAPO", arXiv:2503.14476,
        section 3.4, which mask the loss alone.

        Of an environment's sessions also compute ``trajectory_tokens`` ``[B]``. An estimator sees the tokens of a
        trajectory in the order in which they were sampled, whatever that of its rows is.

        Args:
            batch: ``loss_mask``, ``rewards`` and ``group``; of an environment's sessions ``trajectory``, ``agent``,
                ``turn`` and ``token_rewards``; ``values`` and ``bootstrap`` where there is a critic;
                ``old_logprobs`` and ``ref_logprobs`` where the KL counts in the reward; what the advantage estimator
                declares, such as ``baseline``; and, where recorded, ``finish_reason`` and the columns of reward parts
                and of data.
            kl_coef: The coefficient of the KL in the reward.

        Raises:
            ConfigError: The advantage estimator cannot be found here.
            DataError: The estimator did not return finite ``[N]`` tensors that are 0 outside the mask.
        """
        mask, declared = batch.jagged(fields.LOSS_MASK), ADVANTAGES.declaration(self.algorithm.advantage)
        token_rewards_N = batch.jagged(fields.TOKEN_REWARDS).values if fields.TOKEN_REWARDS in batch else None
        if self.algorithm.kl_in == "reward":
            old_N, ref_N = batch.jagged(fields.OLD_LOGPROBS).values, batch.jagged(fields.REF_LOGPROBS).values
            kl_N = kl_estimate(old_N, ref_N, self.algorithm.kl_estimator)
            own_N = old_N.new_zeros(len(old_N)) if token_rewards_N is None else token_rewards_N
            token_rewards_N = penalize(own_N, kl_N, mask.values, kl_coef)
        trajectories = Trajectories.of(batch)
        truncated_B = None
        if fields.FINISH_REASON in batch:
            truncated_B = torch.tensor([reason == "length" for reason in batch.python(fields.FINISH_REASON)])
        inputs = AdvantageInputs(
            rewards_B=batch.dense(fields.REWARDS)[trajectories.first_R],
            group_B=trajectories.group_R,
            mask_N=trajectories.in_time(mask.values),
            offsets_B1=trajectories.offsets_R1,
            token_rewards_N=None if token_rewards_N is None else trajectories.in_time(token_rewards_N),
            turn_N=trajectories.in_time(batch.jagged(fields.TURN).values) if fields.TURN in batch else None,
            values_N=trajectories.in_time(batch.jagged(fields.VALUES).values) if fields.VALUES in batch else None,
            bootstrap_B=batch.dense(fields.BOOTSTRAP)[trajectories.last_R] if fields.BOOTSTRAP in batch else None,
            baseline_B=batch.dense(fields.BASELINE)[trajectories.first_R] if fields.BASELINE in batch else None,
            truncated_B=None if truncated_B is None else truncated_B[trajectories.last_R],
            parts_B=trajectories.parts(batch),
            data={
                name.removeprefix(fields.DATA): [batch.python(name)[row] for row in trajectories.first_R.tolist()]
                for name in batch
                if name.startswith(fields.DATA)
            },
            **{f"{name}_N": trajectories.in_time(batch.jagged(name).values) for name in declared.columns},
        )
        outputs = compute_advantages(inputs, self.algorithm)
        columns: dict[str, Jagged | Tensor] = {
            fields.ADVANTAGES: mask.like(trajectories.in_rows(outputs.advantages_N.float()))
        }
        if outputs.returns_N is not None:
            columns[fields.RETURNS] = mask.like(trajectories.in_rows(outputs.returns_N.float()))
        columns |= {name: mask.like(trajectories.in_rows(own_N)) for name, own_N in outputs.columns.items()}
        if self.algorithm.cut_off == "leave_out" and inputs.truncated_B is not None:
            columns[LEFT_OUT] = inputs.truncated_B[trajectories.trajectory_B]
        if fields.TRAJECTORY in batch:
            columns[fields.TRAJECTORY_TOKENS] = trajectories.sums(count_sampled(mask))[trajectories.trajectory_B]
        return Batch(columns)

    @endpoint(dispatch=only(0), collect=first(), concurrent=True, readonly=True)
    def describe(self, batch: Batch) -> dict[str, float]:
        """Return metrics of the rewards and lengths of completions, and how far the generator's log-probabilities are
        from the trainer's.

        Args:
            batch: ``rewards``, ``group`` and ``loss_mask``; ``left_out``, if rows are left out; ``baseline``, of greedy
                completions; ``trajectory``, ``agent`` and ``token_rewards`` of an environment's sessions; the columns
                of reward parts, or ``turn``, where the advantage estimator compares these; for the mismatch of
                log-probabilities, in nats, also ``old_logprobs`` and ``rollout_logprobs``.
        """
        mask, trajectories = batch.jagged(fields.LOSS_MASK), Trajectories.of(batch)
        rewards_R = batch.dense(fields.REWARDS)[trajectories.first_R]
        lengths_R = trajectories.sums(count_sampled(mask).float())
        if fields.TOKEN_REWARDS in batch:
            given_N = batch.jagged(fields.TOKEN_REWARDS).values
            sampled = mask.like(torch.where(mask.values.bool(), given_N, 0.0))  # others are ignored, as by estimators
            rewards_R = rewards_R + trajectories.sums(_row_sums(sampled))
        figures = {
            metrics.REWARD_MEAN: float(rewards_R.mean()),
            metrics.REWARD_STD: float(rewards_R.std(correction=0)),
            metrics.LENGTH_MEAN: float(lengths_R.mean()),
            metrics.LENGTH_MAX: float(lengths_R.max()),
        }
        if len(trajectories.group_R.unique()) < len(rewards_R):  # one reward alone is not equal to any other
            by_group = group_statistics(trajectories.find_flat(batch, self.algorithm).float(), trajectories.group_R)
            figures[metrics.FLAT_GROUPS] = float(by_group.mean_G.mean())
        if fields.BASELINE in batch:
            by_prompt = group_statistics(batch.dense(fields.BASELINE), batch.dense(fields.GROUP))
            figures[metrics.BASELINE_MEAN] = float(by_prompt.mean_G.mean())
        if LEFT_OUT in batch:
            figures[metrics.LEFT_OUT] = float(batch.dense(LEFT_OUT)[trajectories.first_R].float().mean())
        if fields.OLD_LOGPROBS in batch and bool(mask.values.any()):
            figures |= self._measure_mismatch(batch, trajectories)
        return figures

    def _measure_mismatch(self, batch: Batch, trajectories: Trajectories) -> dict[str, float]:
        """The mean distance of the log-probabilities under the weights that the loss gives to tokens, as an update
        reports it, and the largest one. Rows that are left out count where there are no others."""
        mask = batch.jagged(fields.LOSS_MASK)
        counted_N = mask.values.bool()
        if LEFT_OUT in batch:
            trained_N = counted_N & torch.repeat_interleave(~batch.dense(LEFT_OUT), mask.lengths)
            counted_N = trained_N if bool(trained_N.any()) else counted_N
        lengths_B = count_sampled(mask.like(counted_N))
        weights_N = loss_weights(
            counted_N,
            mask.offsets,
            self.algorithm.aggregation_mode,
            constant=1.0,  # which scales all weights alike
            trajectory_tokens_B=trajectories.sums(lengths_B)[trajectories.trajectory_B],
        )[counted_N].double()
        old_N, rollout_N = (batch.jagged(n).values[counted_N] for n in (fields.OLD_LOGPROBS, fields.ROLLOUT_LOGPROBS))
        apart_N = (old_N - rollout_N).abs()
        mean = (weights_N * apart_N).sum() / weights_N.sum()
        return {metrics.MISMATCH_MEAN: float(mean), metrics.MISMATCH_MAX: float(apart_N.max())}


@dataclass(frozen=True)
class Trajectories:
    """Which rows make up each trajectory.

    Attributes:
        first_R: int64 ``[R]``, the first row of each.
        last_R: int64 ``[R]``, the row of each in which its last token was sampled.
        group_R: int64 ``[R]``, its group: those of one prompt, and of one agent where there are several.
        offsets_R1: int64 ``[R + 1]``, where its tokens begin and end.
        trajectory_B: int64 ``[B]``, the trajectory of each row.
        order_N: int64 ``[N]``, the places of the tokens of each trajectory in the order of time; None where they stand
            in it.
    """

    first_R: Tensor
    last_R: Tensor
    group_R: Tensor
    offsets_R1: Tensor
    trajectory_B: Tensor
    order_N: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch) -> Trajectories:
        """Those of a batch, whose rows are trajectories where the batch does not say more."""
        mask, group_B = batch.jagged(fields.LOSS_MASK), batch.dense(fields.GROUP)
        first_R = torch.arange(len(batch))
        if fields.TRAJECTORY in batch:
            number_B = batch.dense(fields.TRAJECTORY)
            first_R = first_R[torch.cat([number_B.new_ones(1), number_B.diff()]).bool()] if len(batch) else first_R
        if fields.AGENT in batch:
            names = batch.python(fields.AGENT)
            codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
            group_B = group_B * len(codes) + torch.tensor([codes[name] for name in names], dtype=torch.int64)
        after_R = torch.cat([first_R[1:], first_R.new_tensor([len(batch)])])
        offsets_R1 = torch.cat([mask.offsets[:1], mask.offsets[after_R]])
        trajectory_B = torch.repeat_interleave(torch.arange(len(first_R)), after_R - first_R)
        last_R, order_N = after_R - 1, None
        if fields.TURN in batch and len(first_R) < len(batch):
            order_N = _order_of_time(batch.jagged(fields.TURN).values, mask.values.bool(), offsets_R1)
        if order_N is not None:
            last_R = rows_of_tokens(mask.offsets)[order_N[offsets_R1[1:] - 1]]
        return cls(first_R, last_R, group_B[first_R], offsets_R1, trajectory_B, order_N)

    def find_flat(self, batch: Batch, algorithm: AlgorithmConfig) -> Tensor:
        """Whether all that the estimator compares is equal in the group of each trajectory, bool ``[R]``."""
        token_rewards_N = batch.jagged(fields.TOKEN_REWARDS).values if fields.TOKEN_REWARDS in batch else None
        inputs = AdvantageInputs(
            rewards_B=batch.dense(fields.REWARDS)[self.first_R],
            group_B=self.group_R,
            mask_N=self.in_time(batch.jagged(fields.LOSS_MASK).values.bool()),
            offsets_B1=self.offsets_R1,
            token_rewards_N=None if token_rewards_N is None else self.in_time(token_rewards_N),
            turn_N=self.in_time(batch.jagged(fields.TURN).values) if fields.TURN in batch else None,
            parts_B=self.parts(batch),
        )
        return find_flat(list_compared(inputs, algorithm), self.group_R)

    def parts(self, batch: Batch) -> dict[str, Tensor]:
        """The parts of each trajectory's reward, ``[R]`` by name."""
        names = [name for name in batch if name.startswith(fields.PART)]
        return {name.removeprefix(fields.PART): batch.dense(name)[self.first_R] for name in names}

    def sums(self, values_B: Tensor) -> Tensor:
        """The sum of each trajectory's rows, ``[R]``."""
        return values_B.new_zeros(len(self.first_R)).index_add(0, self.trajectory_B, values_B)

    def in_time(self, values_N: Tensor) -> Tensor:
        """Values by token, of which the rows of a trajectory follow one another, in the order of time."""
        return values_N if self.order_N is None else values_N[self.order_N]

    def in_rows(self, values_N: Tensor) -> Tensor:
        """Undo :meth:`in_time`."""
        return values_N if self.order_N is None else torch.empty_like(values_N).index_copy(0, self.order_N, values_N)


def _order_of_time(turn_N: Tensor, mask_N: Tensor, offsets_R1: Tensor) -> Tensor | None:
    """The order in which the tokens of each trajectory were sampled; None where they stand in it.

    Rows stand in the order in which they began, and a row may go on after a later one has begun. What was read is
    put before what was sampled next.
    """
    tokens = len(turn_N)
    places_N = torch.arange(tokens, device=turn_N.device)
    next_N = torch.where(mask_N, places_N, tokens).flip(0).cummin(0).values.flip(0)
    turn_N = torch.cat([turn_N, turn_N.new_zeros(1)])[next_N]
    key_N = rows_of_tokens(offsets_R1) * (int(turn_N.max()) + 2) + turn_N + 1
    return None if bool((key_N.diff() >= 0).all()) else key_N.argsort(stable=True)


def _row_sums(column: Jagged) -> Tensor:
    """The sum of each row of a token column, float ``[B]``."""
    return row_sums(column.values, rows_of_tokens(column.offsets), len(column.lengths))
