"""Names and shapes of the columns that flow between Podium's packages.

Legend: B rows, N tokens over all rows. A *token column* is a :class:`~podium.data.Jagged` with the offsets of
``tokens``; its entry t describes ``tokens[t]`` given ``tokens[:t]``, so the entry at a row's first token is 0.
"""

from typing import Final

TOKENS: Final = "tokens"  # token column, int64: prompt followed by completion, as sampled
LOSS_MASK: Final = "loss_mask"  # token column, bool: True where the token was sampled and may carry loss
ROLLOUT_LOGPROBS: Final = "rollout_logprobs"  # token column, float32: of the distribution that was sampled from
OLD_LOGPROBS: Final = "old_logprobs"  # token column, float32: of the policy before its update
ROLLOUT_TOP: Final = "rollout_top"  # token column, float32 [N, 2k]: of the k ids likeliest to be sampled, and these ids
EXPERTS: Final = "experts"  # token column, int16 [N, C]: the experts that the layers chose with the token as input
REF_LOGPROBS: Final = "ref_logprobs"  # token column, float32: of the reference policy
TEACHER_LOGPROBS: Final = "teacher_logprobs"  # token column, float32: of the teacher
TEACHER_TOP: Final = "teacher_top"  # token column, float32 [N, 2k]: log-probabilities of the teacher's k likeliest, ids
ANSWER_VALUES: Final = "answer_values"  # float64 [B]: summed log-probabilities of the row, or its score
ENTROPY: Final = "entropy"  # token column, float32, nats
SQUARED_PROBS: Final = "squared_probs"  # token column, float32: the policy's sum of squared probabilities over all ids
VALUES: Final = "values"  # token column, float32: the critic's value before the token is seen
BOOTSTRAP: Final = "bootstrap"  # float32 [B]: the critic's value after the last token of a row that was cut off, else 0
TOKEN_REWARDS: Final = "token_rewards"  # token column, float32: reward given at that token
ADVANTAGES: Final = "advantages"  # token column, float32
RETURNS: Final = "returns"  # token column, float32: the critic's targets
LOSS_WEIGHTS: Final = "loss_weights"  # token column, float32: loss = sum(weights * per-token loss) over all ranks
VERSIONS: Final = "versions"  # token column, int64: version of the weights that sampled the token
VERSION_RANGE: Final = "version_range"  # int64 [B, 2]: the oldest and the newest version of the row's sampled tokens
REWARDS: Final = "rewards"  # float32 [B]: score of the completion
BASELINE: Final = "baseline"  # float32 [B]: reward of the greedy completion of the row's prompt
GROUP: Final = "group"  # int64 [B]: completions of one prompt share it
SEED: Final = "seed"  # int64 [B] or [B, n]: the sampler's seed for each completion
TEXT: Final = "text"  # Jagged uint8: the completion as UTF-8, without special tokens
PART: Final = "part/"  # prefix of columns, float32 [B]: a named part of the reward; NaN where a row has none
DATA: Final = "data/"  # prefix of Python columns: a column of the data, taken from the row of the prompt
FINISH_REASON: Final = "finish_reason"  # Python column of str: "stop" or "length"
STOP_TEXT: Final = "stop_text"  # Python column of str: the text that ended the completion, cut off its text; "": none
PROMPT_TOKENS: Final = "prompt_tokens"  # Jagged int64
KEPT_SIZES: Final = "kept_sizes"  # token column, int64: the number of ids that top-k and top-p left; 0 if not drawn
KEPT_IDS: Final = "kept_ids"  # Jagged int64: those ids, token after token, most probable first
MASK_NUMBERS: Final = (
    "mask_numbers"  # token column, int64: which of the row's masks, from 1, a token came under; 0: none
)
MASK_BITS: Final = "mask_bits"  # Jagged uint8: the row's masks, of equal size; bit i % 8 of byte i // 8 allows id i
TRAJECTORY: Final = "trajectory"  # int64 [B]: rows of one trajectory are adjacent and share a number
TRAJECTORY_TOKENS: Final = "trajectory_tokens"  # int64 [B]: how many tokens were sampled in all of the row's trajectory
TURN: Final = "turn"  # token column, int64: the model's turn, from 0, that sampled the token; -1 where not sampled
AGENT: Final = "agent"  # Python column of str: the agent of a session that said the row; "" for the only one
GRADE: Final = "grade"  # Python column of Earned: what an agent has earned in its environment
TASK: Final = "task"  # Python column: a row of the data, which an environment gets
SESSION: Final = "session"  # int64 [S] or [B]: the number of a session, of a task or of a row, within its step
