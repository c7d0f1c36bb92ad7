"""Settings of the optimizer and of the ranks that train. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field

from podium.algorithms.config import AlgorithmConfig
from podium.config import build_config, section
from podium.errors import ConfigError
from podium.models.config import ModelConfig
from podium.spelling import write_count
from podium.training.learning_rate import compute_learning_rate

if TYPE_CHECKING:
    import torch

LEAST_MICRO_BATCH_TOKENS: Final = 4096
"""The most tokens of a forward pass on a CPU, and the least such number of an accelerator, by default."""

Strategy = Literal["replicate", "fsdp2"]
Offload = Literal["none", "optimizer", "all"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]
Beta = Annotated[float, Field(ge=0, lt=1)]


def check_dropout(model: ModelConfig, algorithm: AlgorithmConfig) -> None:
    """Check that dropout does not change the probability ratios of reinforcement learning.

    Raises:
        ConfigError: Dropout would change them. The message names the keys and the remedy.
    """
    settings = {
        "model.lora.dropout": (model.lora.dropout if model.lora is not None else 0.0, "0"),
        "model.dropout": (model.dropout, "null"),
    }
    key = next((name for name, (value, _) in settings.items() if value), "")
    if not key or not algorithm.reinforces or not algorithm.compared_policy:
        return
    value, off = settings[key]
    what = f"{key} = {str(value).lower()} with"
    if algorithm.updates > 1:
        raise ConfigError(
            f"{what} algorithm.epochs x algorithm.minibatches = {algorithm.updates} updates a step: the old "
            "log-probabilities are computed without dropout, so that it would count as a change of the policy; set "
            f"{key} to {off}, or make one update a step"
        )
    raise ConfigError(
        f"{what} algorithm.loss = {algorithm.loss!r} and algorithm.correction = {algorithm.correction!r}, which "
        "compare the policy with the generator: the generator has no dropout, so that it would count as a difference "
        f"of the two; set {key} to {off}, or choose a loss whose ratio is to the policy before the update, and "
        "algorithm.correction = none"
    )


@section("optim")
class OptimConfig:
    """AdamW (Loshchilov & Hutter 2019) and the learning rate over the run."""

    lr: float = Field(default=1e-5, ge=0, le=10)
    """The learning rate rises to this value and then follows optim.lr_schedule."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW averages the gradient and its square over time with these two decay rates."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """AdamW adds this value to the divisor of each update, so that it never divides by zero."""
    weight_decay: float = Field(default=0.0, ge=0, le=10)
    """AdamW shrinks matrices by lr * weight_decay at each step. Norms and biases do not decay."""
    master_weights: bool = True
    """Parameters in bfloat16 have copies in float32, which take the updates. false saves their memory and rounds each
    updated parameter up or down at random, so that updates count on average."""
    grad_clip: float = Field(default=1.0, ge=0, le=1e9)
    """Gradients with a larger global norm are scaled down to this norm. 0 turns clipping off."""
    warmup_steps: int = Field(default=0, ge=0, le=10**9)
    """The learning rate rises linearly over this number of optimizer steps."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up the learning rate stays constant, or falls to 0 at the end of the run, linearly or as a half
    cosine."""

    @property
    def end(self) -> int | None:
        """The optimizer step at which the learning rate reaches 0; None where it is not known."""
        return None

    @property
    def begin(self) -> int:
        """The optimizer step with which the warm-up begins. Steps before it have its learning rate."""
        return 0

    def learning_rate(self, step: int, shift: int = 0) -> float:
        """Return the learning rate of optimizer step ``step``, counted from 0.

        Args:
            shift: Optimizer steps to add for the place in the schedule, after a resume with another number of updates
                a step. The warm-up counts the steps that were made.

        Raises:
            ConfigError: The rate falls, and nobody says where it ends.
        """
        end = self.begin + self.warmup_steps + 1 if self.lr_schedule == "constant" else self._require_end()
        done = max(0, step + shift - self.begin)
        warmed = step if not self.begin else max(done, step - self.begin)
        return compute_learning_rate(self.lr, self.lr_schedule, done, self.warmup_steps, end - self.begin, warmed)

    def _require_end(self) -> int:
        if self.end is None:
            raise ConfigError(
                f"optim.lr_schedule={self.lr_schedule!r} falls to 0 at the end of a run: give its optimizer steps by "
                "podium.training.config.EndingOptim(total_steps=...)"
            )
        return self.end


@section()
class EndingOptim(OptimConfig):
    """The optimizer of a run whose number of optimizer steps is known."""

    total_steps: int = Field(ge=1)
    """The learning rate reaches 0 at this optimizer step, unless it is constant."""
    first_step: int = Field(default=0, ge=0)
    """The warm-up begins with this optimizer step."""

    def __post_init__(self) -> None:
        steps = self.total_steps - self.first_step
        if self.lr_schedule != "constant" and steps <= self.warmup_steps:
            raise ConfigError(
                f"optim.warmup_steps = {self.warmup_steps} is not below the {write_count(steps, 'optimizer step')} of "
                f"the run, over which optim.lr_schedule = {self.lr_schedule!r} falls to 0: lower it, or raise run.steps"
            )

    @property
    def begin(self) -> int:
        """The optimizer step with which the warm-up begins."""
        return self.first_step

    @property
    def end(self) -> int | None:
        """The optimizer step at which the learning rate reaches 0."""
        return self.total_steps


@section("parallel.precision")
class PrecisionChoice:
    """The data types of matrix products: the entries of ``parallel.precision``, where that is a mapping."""

    compute: Precision = "auto"
    """Matrix products are computed in this data type, as without a mapping."""
    output: Literal["compute", "float32"] = "compute"
    """The output layer is computed in this data type: that of the other products (compute), or float32 from weights
    that are not rounded (MiniMax-M1, arXiv:2506.13585, section 3.2; ScaleRL, arXiv:2510.13786)."""


@section("parallel")
class ParallelConfig:
    """How training uses ranks, memory and precision. Results change by rounding errors only."""

    strategy: Strategy = "replicate"
    """Each rank holds the whole model (replicate) or a shard of it (fsdp2). replicate is faster where the model
    fits."""
    micro_batch_tokens: int | None = Field(default=None, ge=1, le=10**9)
    """A forward pass takes at most this many tokens, padding included. null means 4096, and on an accelerator up to
    16384: as many as a third of the memory that the model leaves has room for."""
    batching: Literal["auto", "padded", "packed"] = "auto"
    """Rows of similar length are padded (padded), or rows are put end to end with variable-length attention (packed).
    auto packs on accelerators, if a test of the model shows that packed rows stay apart, and pads on the CPU, where
    padding is faster. With auto, rows with the same prompt share one copy of it in a forward pass, if a test of the
    model shows that this changes nothing."""
    precision: Precision | Mapping[str, Any] = "auto"
    """Matrix products are computed in this data type. auto means bfloat16 on accelerators, and model.dtype on the CPU.
    float16 scales the loss, so that small gradients are not lost. {compute: bfloat16, output: float32} computes the
    output layer in float32."""
    offload: Offload = "none"
    """This part of a role leaves its device for the host while the role is idle: nothing, the optimizer's state and the
    gradients (optimizer), or the weights too (all). Roles that share a device then fit into less of its memory."""

    def __post_init__(self) -> None:
        _ = self.choice  # raises an error if an entry is unknown

    @property
    def counted_tokens(self) -> int:
        """``micro_batch_tokens`` or, where an accelerator may take more by default, the least that it takes."""
        return self.micro_batch_tokens or LEAST_MICRO_BATCH_TOKENS

    @property
    def choice(self) -> PrecisionChoice:
        """``precision`` by its entries. Raises ConfigError for an entry that is wrong."""
        entries = {"compute": self.precision} if isinstance(self.precision, str) else self.precision
        return build_config(PrecisionChoice, entries, key="parallel.precision")

    def packed(self, device: torch.device) -> bool:
        """Whether rows are packed on this device."""
        return self.batching == "packed" or (self.batching == "auto" and device.type != "cpu")
