"""The contract of a generation engine, its configuration and the checks that all engines share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from podium.errors import ConfigError, GenerationError
from podium.rollout.engines.gate import WeightGate
from podium.rollout.sampling import Completion, KeptSet, SamplingParams

__all__ = ["Engine", "EngineConfig", "EngineName", "assemble", "check_request"]

EngineName = Literal["auto", "native", "transformers", "vllm"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Which engine generates, and how much it may hold.

    Attributes:
        name: ``"native"`` (Llama and Qwen families), ``"transformers"`` (any architecture), ``"vllm"`` (extra), or
            ``"auto"``: native where it can, else transformers.
        slots: the most completions decoded side by side.
        cache_gib: the most memory for keys and values, in GiB; None is a quarter of what the device has free. Fewer
            slots are used when ``slots`` of them would not fit.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; None generates in the model's own. Another dtype costs
            a copy of the weights.
        prefill_tokens: the most prompt tokens in one forward pass.

    Raises:
        ConfigError: a value outside its range, named.
    """

    name: EngineName = "auto"
    slots: int = 128
    cache_gib: float | None = None
    dtype: str | None = None
    prefill_tokens: int = 8192

    def __post_init__(self) -> None:
        if self.name not in get_args(EngineName):
            raise ConfigError(f"engine.name is {self.name!r}; expected one of {', '.join(get_args(EngineName))}")
        if self.slots < 1:
            raise ConfigError(f"engine.slots is {self.slots}; expected at least 1")
        if self.prefill_tokens < 1:
            raise ConfigError(f"engine.prefill_tokens is {self.prefill_tokens}; expected at least 1")
        if self.cache_gib is not None and not self.cache_gib > 0:
            raise ConfigError(
                f"engine.cache_gib is {self.cache_gib}; expected above 0, or null for a quarter of what is free"
            )
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ConfigError(f"engine.dtype is {self.dtype!r}; expected null or one of {', '.join(_DTYPES)}")

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """``dtype`` as torch's own, or None."""
        return None if self.dtype is None else _DTYPES[self.dtype]


class Engine(ABC):
    """Draws completions from a language model and takes new weights in place.

    What a completion is depends on its prompt, the sampling parameters, its seed and the weights, not on the other
    completions of the call, their order, or the number of ranks they are spread over. Each engine's docstring says how
    far floating-point rounding lets it keep that promise.

    New weights may come while ``generate`` runs in another thread. ``gate`` keeps the two apart: no token is drawn from
    weights of two versions, and each carries the version that drew it. An engine's docstring says how soon it lets
    them in: between two tokens, or between two batches.

    Args:
        refusal: why nothing can be drawn yet; "" where the weights are there.
    """

    def __init__(self, refusal: str = "") -> None:
        self.gate = WeightGate(refusal)

    @property
    def version(self) -> int:
        """The version of the weights that the next token is drawn from; 0 before the first ``refresh``."""
        return self.gate.version

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """Draw ``params.n`` completions for each of P prompts, one seed a completion.

        Args:
            prompts: P sequences of token ids, none of them empty; lengths may differ.
            params: how to draw.
            seeds: ``P * params.n`` signed integers of 64 bits, prompt-major like the result.

        Returns:
            ``P * params.n`` completions: those of the first prompt, then those of the second, and so on.

        Raises:
            ConfigError: an empty prompt, an id outside the vocabulary, a wrong number of seeds, or a prompt that with
                ``max_new_tokens`` is longer than the model's positions.
            GenerationError: the model's logits are not finite, or there are no whole weights to draw from.
        """

    def refresh(self, version: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """Take the weights of ``version``, in place.

        Without ``weights`` the engine reads the model it was made with, which has changed in place: at no cost where it
        shares that model's parameters, by a gathered copy where they are sharded or of another dtype (then every rank
        of the mesh must call). With ``weights``, full tensors by parameter name, those are copied into the model that
        the engine reads.

        Raises:
            ConfigError: names or shapes that do not fit the model, named; the weights are then as they were.
        """
        if weights is not None:
            self.check_weights({name: tuple(tensor.shape) for name, tensor in weights.items()})
        with self.gate.changing(version):
            if weights is None:
                self._reread()
            else:
                for name, tensor in weights.items():
                    self.load(name, 0, tensor)
            self.loaded()

    # -- new weights, a part at a time: check, gate.close, load ..., loaded, gate.open ----------------------------

    @abstractmethod
    def check_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise ConfigError unless tensors of these names and shapes are all that the model needs, and no more."""

    @abstractmethod
    def load(self, name: str, start: int, values: Tensor) -> None:
        """Copy ``values`` over the rows of the weight ``name`` from ``start`` on; the gate is closed."""

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> Tensor | None:
        """Rows of a weight as this engine holds them; None where it keeps them in a form of its own."""

    @abstractmethod
    def loaded(self) -> None:
        """All of the new weights are there: forget what was derived from the old; the gate is closed."""

    @abstractmethod
    def _reread(self) -> None:
        """Bring the engine's weights to what the model that it was made with holds now; the gate is closed."""

    def release(self) -> None:  # noqa: B027 - an engine that keeps no buffers between calls has nothing to do
        """Give back the buffers kept between calls; the next ``generate`` makes them again."""


def check_request(
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    seeds: Sequence[int],
    *,
    vocabulary: int,
    positions: int | None,
) -> None:
    """Raise ConfigError for what no engine can generate; see ``Engine.generate``."""
    if len(seeds) != len(prompts) * params.n:
        raise ConfigError(
            f"{len(prompts)} prompts with n={params.n} need {len(prompts) * params.n} seeds, one a completion; "
            f"got {len(seeds)}"
        )
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise ConfigError(f"prompt {index} is empty; give it at least one token, such as the model's BOS")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= vocabulary:
            raise ConfigError(
                f"prompt {index} has token {low if low < 0 else high}, outside the model's vocabulary of {vocabulary}; "
                "is it the model's own tokenizer?"
            )
        if positions is not None and len(prompt) + params.max_new_tokens > positions:
            raise ConfigError(
                f"prompt {index} has {len(prompt)} tokens, which with max_new_tokens={params.max_new_tokens} exceeds "
                f"the model's {positions} positions; shorten the prompt or lower sampling.max_new_tokens"
            )


@torch.inference_mode(False)  # what is returned may take part in training, which inference tensors may not
def assemble(
    ids_CT: Tensor,
    logprobs_CT: Tensor,
    params: SamplingParams,
    versions_CT: Tensor,
    kept: Sequence[Sequence[Tensor]] | None = None,
) -> list[Completion]:
    """The records of C completions from T draws each, on the CPU; what follows a first stop token is dropped.

    ``versions_CT`` are those of the weights that each draw was made from.
    ``kept[c][t]`` are the ids kept for draw t of completion c, for at least its length of draws.
    """
    lengths, stopped = _lengths(ids_CT, params.stop_token_ids)
    drawn = torch.arange(ids_CT.shape[1]) < lengths.unsqueeze(1)
    broken = (~torch.isfinite(logprobs_CT) & drawn).nonzero()
    if len(broken):
        row, position = broken[0].tolist()
        raise GenerationError(
            f"the log-probability of token {position} of completion {row % params.n} of prompt {row // params.n} is "
            f"{logprobs_CT[row, position].item()}: the model's logits are not finite; look at the last update's "
            "gradient norm and learning rate, or at the checkpoint"
        )
    return [
        Completion(
            ids_CT[row, :length].clone(),
            logprobs_CT[row, :length].clone(),
            "stop" if stop else "length",
            versions_CT[row, :length].clone(),
            None if kept is None else _kept_set(kept[row][:length]),
        )
        for row, (length, stop) in enumerate(zip(lengths.tolist(), stopped.tolist(), strict=True))
    ]


def _lengths(ids_CT: Tensor, stop_token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Of each row: tokens up to and with its first stop token, int64 ``[C]``, and whether it has one, bool ``[C]``."""
    hits = torch.isin(ids_CT, torch.tensor(stop_token_ids, dtype=torch.int64))
    stopped = hits.any(1)
    first = hits.to(torch.int8).argmax(1) + 1
    return torch.where(stopped, first, ids_CT.shape[1]), stopped


def _kept_set(sets: Sequence[Tensor]) -> KeptSet:
    sizes = torch.tensor([0, *map(len, sets)], dtype=torch.int64)
    return KeptSet(torch.cat(list(sets)), sizes.cumsum(0))
