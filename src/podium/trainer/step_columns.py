"""The columns of a step's batch that each stage of ``learn`` reads, so that no stage sends others to its workers."""

from typing import Final

from podium.algorithms import Declaration
from podium.data import Batch, fields
from podium.workers.learner import LEFT_OUT

MODEL_INPUTS = (
    *(fields.TOKENS, fields.LOSS_MASK, fields.GROUP, fields.KEPT_SIZES, fields.KEPT_IDS),
    *(fields.MASK_NUMBERS, fields.MASK_BITS, fields.EXPERTS),
)
VALUE_INPUTS = (fields.TOKENS, fields.LOSS_MASK, fields.GROUP)
SESSION_INPUTS = (fields.TRAJECTORY, fields.AGENT, fields.TOKEN_REWARDS)
ADVANTAGE_INPUTS = (
    *(fields.LOSS_MASK, fields.REWARDS, fields.GROUP, fields.VALUES, fields.BOOTSTRAP),
    *(fields.FINISH_REASON, fields.BASELINE, *SESSION_INPUTS, fields.TURN),
)
KL_INPUTS = (fields.OLD_LOGPROBS, fields.REF_LOGPROBS)
FIGURE_INPUTS = (fields.LOSS_MASK, fields.REWARDS, fields.GROUP, fields.BASELINE, LEFT_OUT, *SESSION_INPUTS)
MISMATCH_INPUTS = (fields.OLD_LOGPROBS, fields.ROLLOUT_LOGPROBS)
EXTRAS: Final = {"entropy": fields.ENTROPY, "squares": fields.SQUARED_PROBS}  # which the policy computes if asked to
ROW_INPUTS = (fields.LOSS_MASK, fields.GROUP)
KEPT = (fields.ADVANTAGES, fields.OLD_LOGPROBS)
UPDATE_INPUTS = (
    *(fields.ADVANTAGES, fields.OLD_LOGPROBS, fields.ROLLOUT_LOGPROBS, fields.REF_LOGPROBS, fields.TEACHER_LOGPROBS),
    *(fields.TEACHER_TOP, fields.ROLLOUT_TOP, fields.VALUES, fields.RETURNS, fields.TRAJECTORY_TOKENS, LEFT_OUT),
    fields.LOSS_WEIGHTS,  # of a stage of the user's own
)


def list_compared(batch: Batch, estimator: Declaration) -> tuple[str, ...]:
    """Return the columns of a batch, beside rewards, that an advantage estimator compares."""
    parts = [name for name in batch if name.startswith(fields.PART)] if estimator.compares == "parts" else []
    return (*parts, *((fields.TURN,) if estimator.compares == "turns" else ()))


def select(batch: Batch, columns: tuple[str, ...]) -> Batch:
    """Return those of the columns that a batch has."""
    return batch.select(*(name for name in columns if name in batch))
