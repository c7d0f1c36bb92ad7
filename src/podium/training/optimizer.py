"""AdamW, which updates parameters of bfloat16 in float32.

A bfloat16 number has 8 significant bits. An update of less than about 1/512 of a parameter would round to nothing, and
the averages of AdamW would stand still. So updates go to copies of the parameters in float32 that are kept, or the
parameters are rounded up or down at random, with the probability at which they keep the update on average.

Gradients that pass through float16 are those of a scaled loss. A float16 number below 6e-8 is 0, and one above 65,504
is infinite. The weight of a token is one in a million where a step has a million tokens, so that most of its gradient
would be 0.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from podium.devices import round_stochastically
from podium.models.value_head import is_of_value_head
from podium.training.config import OptimConfig

_FIRST: Final = 2.0**16
_LARGEST: Final = 2.0**24
_GROW_EVERY: Final = 50  # steps; a scale that proves too large costs one more pass over the minibatch
_LOWER_BY: Final = 4.0
_NORM_CLASS: Final = re.compile(r"Norm(Gated|\d+d)?$")  # CohereLayerNorm and BatchNorm1d; not NormedEmbedding
_NORM_NAME: Final = re.compile(r"norm\d*$")  # q_norm, layernorm and norm1
_STATE_SPACE: Final = ("A_log", "D")  # of Gu and Dao 2023, "Mamba", arXiv:2312.00752, whose authors let neither decay


class Optimizer(torch.optim.AdamW):
    """AdamW with its state, so that a checkpoint can be read into it before the first step.

    Args:
        model: Its parameters that require gradients are trained.
        sums: The float32 gradients of parameters that cannot hold float32 themselves.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, sums: Mapping[nn.Parameter, Tensor]) -> None:
        head = {name: p for name, p in model.named_parameters() if is_of_value_head(name)}
        matrices = find_matrices(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        body = [parameter for parameter in trained if all(parameter is not part for part in head.values())]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in part if (p in matrices) == decays], "weight_decay": decay, "is_head": is_head}
            for is_head, part in ((False, body), (True, list(head.values())))
            for decays, decay in ((True, config.weight_decay), (False, 0.0))
        ]
        super().__init__(
            [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
        self._sums = sums
        for parameter in trained:
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
            }
            if parameter in sums and config.master_weights:
                self.state[parameter]["master"] = parameter.detach().float()

    @torch.no_grad()
    def update(self, lr: float | None, step: int, head_lr: float | None = None) -> None:
        """Update all parameters, or those of the value head alone where ``lr`` is None. The rounding at random depends
        on ``step`` and is the same on ranks that hold the same parameters."""
        every = self.param_groups
        for group in every:
            group["lr"] = head_lr if group["is_head"] else lr
        try:
            self.param_groups = [group for group in every if group["lr"] is not None]
            self.step()  # of parameters that hold their gradients themselves
        finally:
            self.param_groups = every
        low = [(parameter, group) for group in every for parameter in group["params"]]
        for index, (parameter, group) in enumerate(low):
            if parameter not in self._sums or group["lr"] is None:
                continue
            state = {name: _local(tensor) for name, tensor in self.state[parameter].items()}
            target = _local(parameter)
            exact = state["master"] if "master" in state else target.float()
            adamw(
                [exact],
                [_local(self._sums[parameter])],
                [state["exp_avg"]],
                [state["exp_avg_sq"]],
                [],
                [state["step"]],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            target.copy_(exact if "master" in state else round_stochastically(exact, step * len(low) + index))


def find_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of ``model`` that decay: all but norms, biases, vectors and the dynamics of a state space.

    Some of these have several dimensions, such as the biases of experts, norms with a row for each head, and vectors in
    a shape that broadcasts. A norm or a bias is known by its name or by the class of the module that has it; what says
    how fast a state of Mamba fades, and how much of the input passes it, by the names that they have in transformers.
    """
    matrices = set[nn.Parameter]()
    for path, module in model.named_modules():
        is_norm = not isinstance(module, nn.Linear | nn.Embedding) and (
            _NORM_CLASS.search(type(module).__name__) or _NORM_NAME.search(path.rpartition(".")[2])
        )
        for name, parameter in module.named_parameters(recurse=False):
            is_bias = name == "bias" or name.endswith("_bias")
            if not is_norm and not is_bias and name not in _STATE_SPACE and not _is_vector(parameter):
                matrices.add(parameter)
    return matrices


def _is_vector(parameter: Tensor) -> bool:
    """Whether a parameter has one dimension, or several without meaning. A linear layer with one output is a matrix."""
    return parameter.dim() < 2 or (parameter.dim() > 2 and sum(size > 1 for size in parameter.shape) < 2)


@torch.no_grad()
def move_parameter(parameter: Tensor, followed: Tensor, share: float, seed: int) -> None:
    """Move ``share`` of the way from a parameter to another one that is sharded as it is. In bfloat16 the result is
    rounded at random by ``seed``: to the nearest, a small share of a small distance would always be 0."""
    target, goal = _local(parameter), _local(followed)
    if share == 1.0:
        target.copy_(goal)
    elif target.dtype == torch.bfloat16:
        target.copy_(round_stochastically(target.float().lerp(goal.float(), share), seed))
    else:
        target.lerp_(goal.to(target.dtype), share)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that FSDP2 shards."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]
    return part.detach()


class LossScale:
    """The factor of the loss in the backward pass, by which the gradients are divided before anything reads them.

    Dynamic loss scaling: Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740, section 3.2. Unlike
    there, a step whose gradients overflow is not skipped: its backward pass is made again with a lower scale, because a
    minibatch of completions costs more than a pass over it. All ranks see the same norm, so that they agree.

    Args:
        precision: The data type of matrix products. The scale of any other type than float16 is 1 and stays so.

    Attributes:
        value: A power of two.
        steps: The number of steps since the value last changed.
    """

    def __init__(self, precision: torch.dtype) -> None:
        self.is_used = precision == torch.float16
        self.value = _FIRST if self.is_used else 1.0
        self.steps = 0

    def lower(self) -> bool:
        """Lower the scale, because gradients were not finite. Return whether there is a lower one."""
        if self.value == 1.0:
            return False
        self.value, self.steps = max(1.0, self.value / _LOWER_BY), 0
        return True

    def count_step(self) -> None:
        """Count a step with finite gradients, and double the scale after many of them."""
        if not self.is_used:
            return
        self.steps += 1
        if self.steps == _GROW_EVERY:
            self.value, self.steps = min(_LARGEST, 2.0 * self.value), 0

    @property
    def state(self) -> Tensor:
        """Value and number of steps, float64 ``[2]``, for a checkpoint."""
        return torch.tensor([self.value, self.steps], dtype=torch.float64)

    def restore(self, state: Tensor) -> None:
        """Continue from a ``state``."""
        value, steps = state.tolist()
        self.value, self.steps = value, int(steps)
