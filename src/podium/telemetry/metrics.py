"""Names of the metrics of a step, each written once: what the trainer reports and every display looks up.

A name's part before the slash is its panel in TensorBoard, W&B and Trackio. Shares and accuracies are in 0..1,
lengths in tokens, times in seconds, log-probabilities in nats.
"""

from typing import Final

LOSS: Final = "loss"
REWARD_MEAN: Final = "reward/mean"
ENTROPY_COEF: Final = "policy/entropy_coef"  # where it follows a target
UPDATES: Final = "policy/updates"  # optimizer steps of the policy in a step, where their number may vary
APPROX_KL: Final = "policy/approx_kl"  # KL(policy before the update || policy) by k3; of the generator with ratio_to
REWARD_STD: Final = "reward/std"
BASELINE_MEAN: Final = "reward/baseline_mean"  # of greedy completions, for an estimator that needs them
ACCURACY: Final = "reward/accuracy"  # share of completions, or of sessions, whose grade says correct; of preferences,
# share of the pairs whose better answer has the higher reward
REWARD_MARGIN: Final = "reward/margin"  # reward of the better answer of a pair minus that of the worse one
REWARD_CHOSEN: Final = "reward/chosen"  # mean reward of the better answers, or of the desirable ones
REWARD_REJECTED: Final = "reward/rejected"
LOGPROBS_CHOSEN: Final = "policy/logprobs_chosen"  # mean log-probability of the better answers, each a sum over tokens
LOGPROBS_REJECTED: Final = "policy/logprobs_rejected"
ABSTAINED: Final = "reward/abstained"  # completions that every reward function left out, in steps that have some
FILTER_DROPPED: Final = "filter/flat_groups"  # share of the groups that were drawn: equal rewards or verdicts
FILTER_REWARD: Final = "filter/reward_mean"  # of all completions that were drawn
FILTER_REFILLS: Final = "filter/refills"  # further draws of the step
FILTER_MISSING: Final = "filter/missing"  # groups that the step is short of after the last draw
FLAT_GROUPS: Final = "reward/flat_groups"  # share of groups whose rewards are all equal: no signal for GRPO
KL: Final = "policy/kl"  # policy to reference, mean over tokens under the weights of the loss
ENTROPY: Final = "policy/entropy"
CLIP_FRACTION: Final = "policy/clip_fraction"
RATIO_MEAN: Final = "policy/ratio_mean"
RATIO_MAX: Final = "policy/ratio_max"
GRAD_NORM: Final = "policy/grad_norm"  # before clipping
LEARNING_RATE: Final = "policy/learning_rate"
SKIPPED_STEPS: Final = "policy/skipped_steps"  # optimizer steps so far whose gradient was not finite
MISMATCH_MEAN: Final = "mismatch/mean"  # |generator's minus trainer's log-probability| of the sampled tokens
MISMATCH_MAX: Final = "mismatch/max"
LENGTH_MEAN: Final = "completion/length_mean"
LENGTH_MAX: Final = "completion/length_max"
SAMPLED: Final = "completion/sampled"  # tokens of all completions that were drawn for the step, trained or not
TRUNCATED: Final = "completion/truncated"  # share that ended by length, not by a stop token
LEFT_OUT: Final = "completion/left_out"  # share that is left out of the loss; only with algorithm.cut_off = leave_out
SESSIONS_FAILED: Final = "sessions/failed"  # share of a step's sessions of an environment that failed
SESSIONS_FULL: Final = "sessions/context_full"  # share that ended because the model's context was full
SESSIONS_LIMITS: Final = {  # share that ended by an option of the environment, by its name
    name: f"sessions/{name}" for name in ("turn_limit", "sampled_limit", "read_limit", "tool_call_limit")
}
SESSIONS_SPLITS: Final = "sessions/splits"  # calls whose history the chat template writes otherwise than it was sampled
SESSIONS_UNRECOGNIZED: Final = (
    "sessions/unrecognized"  # calls that begin a row because the agent has edited the history
)
SESSIONS_TRAINED: Final = "sessions/trained"  # trajectories that are trained: a session's, or those of its agents
SESSIONS_ROWS: Final = "sessions/rows"  # rows of these trajectories
SESSIONS_TURNS: Final = "sessions/turns"  # answers of the model in a session, on average
SESSIONS_TOOL_CALLS: Final = "sessions/tool_calls"  # of a session, on average
SESSIONS_TOOL_ERRORS: Final = "sessions/tool_errors"  # share of these calls that were answered with an error
SESSIONS_READ: Final = "sessions/prompt_tokens"  # of all prompts that the model read in the step's sessions
SESSIONS_REUSED: Final = "sessions/prompt_tokens_reused"  # those of them that the engine had not to compute again
SESSIONS_EVICTED: Final = "sessions/prompt_tokens_evicted"  # tokens that it forgot because engine.cache_gib was full
SESSIONS_WAITED: Final = "sessions/waited"  # sessions of the step whose turns waited for memory of engine.cache_gib
SESSIONS_WAIT_S_MEAN: Final = "sessions/wait_s_mean"  # seconds that a session waited so, on average over all
SESSIONS_WAIT_S_MAX: Final = "sessions/wait_s_max"
SESSION_S_MEDIAN: Final = "sessions/seconds_median"
SESSION_S_MAX: Final = "sessions/seconds_max"
VALUE_LOSS: Final = "value/loss"
EXPLAINED_VARIANCE: Final = "value/explained_variance"
TOKENS: Final = "tokens"  # prompt and completion tokens of the step
TOKENS_TOTAL: Final = "progress/tokens"  # of all steps since the run began
EPOCH: Final = "progress/epoch"  # passes over the training data since then
STEP_S: Final = "time/step"
TOKENS_PER_S: Final = "tokens_per_s/step"  # TOKENS over STEP_S
AGENT_REWARD_PREFIX: Final = "agent_reward/"  # + the name of an agent in a session: its mean reward
SOURCE_REWARD_PREFIX: Final = "source_reward/"  # + the name of one of several sources of the data: its mean reward
REWARD_PART_PREFIX: Final = "reward_parts/"  # + the name of a part that the reward returns: its mean
TOKENS_PER_S_PREFIX: Final = "tokens_per_s/"  # + a stage's name: "tokens_per_s/generate"
TIME_PREFIX: Final = "time/"  # + a stage's name: "time/generate"
