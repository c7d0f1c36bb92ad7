"""Whether rows that share a forward pass affect each other, tested on the model itself with a few short rows.

The rows go through the model together and each alone. Together they must give the output layer the same hidden states
within rounding, and the gradient of the last row's states with respect to all inputs that are not its own must be
zero. A leak between rows that small weights hide in rounding shows in this gradient, which is exactly zero where there
is no path. The gradient of a row's first states with respect to its later inputs shows in the same way whether a model
reads ahead, as encoders do: it would see the token that it is to predict.

On a large model the trial is several passes of it. Later starts read its verdict from a file (see
:mod:`.row_isolation_cache`), and compute a row of two tokens, which shows that the weights give finite numbers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from podium.data import Batch, Jagged, fields
from podium.devices import autocast, same_within_rounding
from podium.errors import ConfigError
from podium.exceptions import describe_error
from podium.models.loading import longrope_threshold, plain_model
from podium.training.config import ParallelConfig
from podium.training.data_parallel import is_sharded
from podium.training.micro_batches import cut
from podium.training.row_isolation_cache import RowIsolationCache
from podium.training.scoring import run_model
from podium.training.shared_prompts import SharedPrompts

Batching = Literal["packed", "padded", "equal"]
"""Rows share a forward pass end to end, or padded, or only with rows of their own length."""

_LONGEST: Final = 14  # of the rows, in tokens
_SHORTEST: Final = 8  # that share a prompt
_MOST_IDS: Final = 1000  # a vocabulary begins with text; ids of images and the like come late
_MIXED: Final = "what it computes for one row depends on the other row or on padding"
_DIFFERENT: Final = "what it computes for a row is not what the row gives alone"
_AHEAD: Final = "what it computes for a token depends on later tokens"
_DIRECTIONS: Final = {"use_bidirectional_attention": True, "is_decoder": False}
"""The fields of configurations by which a model of a causal architecture reads ahead."""


def choose_batching(
    model: nn.Module, config: ParallelConfig, device: torch.device, precision: torch.dtype, *, causal: bool = True
) -> tuple[Batching, str]:
    """Return how rows share a forward pass of this model, and a sentence if that is not what ``config`` prefers.

    Args:
        causal: Whether the model must not read ahead, because it predicts each token from those before it.

    Raises:
        ConfigError: ``config.batching`` is "packed", and the model mixes packed rows; or the model mixes even rows of
            one length; or it reads ahead.
    """
    name, note = type(plain_model(model)).__name__, ""
    cache = _open_cache(model, device, precision)

    def find_reason(**rows: bool) -> str:
        reason = _try(cache, model, device, precision, **rows)
        if reason == _AHEAD and causal:
            raise ConfigError(_explain_ahead(model))
        return "" if reason == _AHEAD else reason

    if config.packed(device):
        reason = find_reason(packed=True)
        if not reason:
            return "packed", ""
        if config.batching == "packed":
            raise ConfigError(f"parallel.batching=packed: {name} cannot take packed rows: {reason}; use auto or padded")
        note = f"{name} gets padded rows, because it cannot take packed ones: {reason}"
    reason = find_reason()
    if not reason:
        return "padded", note
    if other := find_reason(equal=True):
        raise ConfigError(f"{name} cannot take several rows in a forward pass: {other}")
    return "equal", f"{name} gets rows of one length at a time, because it cannot take padded ones: {reason}"


def _explain_ahead(model: nn.Module) -> str:
    """Return the error about a model that reads ahead."""
    inner = plain_model(model)
    settings = inner.config.get_text_config()
    field = next((name for name, ahead in _DIRECTIONS.items() if getattr(settings, name, None) is ahead), None)
    remedy = "" if field is None else f", or set {field} to {str(not _DIRECTIONS[field]).lower()} in its configuration"
    return (
        f"{type(inner).__name__} reads texts in both directions: {_AHEAD}, so that it would see what it is to predict, "
        f"and its log-probabilities would be those of no text that it writes: choose a causal language model{remedy}"
    )


def may_share_prompts(
    model: nn.Module, config: ParallelConfig, batching: Batching, device: torch.device, precision: torch.dtype
) -> bool:
    """Return whether rows with the same prompt may share it in a forward pass of this model, which gets ``batching``.

    They may not if a layer rotates by the length of the row.
    """
    turns = longrope_threshold(plain_model(model).config) is not None
    if config.batching != "auto" or batching == "equal" or turns:
        return False
    return not _try(_open_cache(model, device, precision), model, device, precision, share=True)


def _open_cache(model: nn.Module, device: torch.device, precision: torch.dtype) -> RowIsolationCache:
    return RowIsolationCache(model, device, precision, ("", _MIXED, _DIFFERENT, _AHEAD), sharded=is_sharded(model))


def _try(cache: RowIsolationCache, model: nn.Module, device: torch.device, precision: torch.dtype, **rows: bool) -> str:
    """Return what :func:`interference` returns for such rows, or returned at an earlier start."""
    trial = " ".join(sorted(rows)) or "padded"
    verdict = cache.find(trial)
    if verdict is None:
        verdict = interference(model, device, precision, **rows)
        cache.keep(trial, verdict)
    elif "share" not in rows:  # other rows of the same model were computed before those that share a prompt
        with _evaluating(model, device, precision), torch.no_grad():
            row = _rows(_vocabulary(model), [2], [1], share=False).to(device)
            _check_finite(plain_model(model), [_pass(model, row)[0]])
    return verdict


def interference(
    model: nn.Module,
    device: torch.device,
    precision: torch.dtype,
    *,
    packed: bool = False,
    equal: bool = False,
    share: bool = False,
) -> str:
    """Return why rows that share a forward pass change one another; "" if they do not. Rows that do not, of a model
    that reads ahead, give a sentence of their own.

    Random state, gradients and mode of the model stay as they were.

    Args:
        precision: The data type of matrix products.
        equal: Whether the rows are of one length, so that neither gets padding.
        share: Whether there are three rows, of which two share their prompt.
    """
    inner, longest = plain_model(model), _longest(model)
    lengths, prompts = [longest, longest if equal else longest * 2 // 3], [1, 1]
    if share:
        lengths, prompts = [longest, longest - 1, longest - 3], [longest // 3, longest // 2, longest // 2]
        if longest < _SHORTEST:
            return f"the model has {longest} positions"
    rows = _rows(_vocabulary(model), lengths, prompts, share=share).to(device)
    with _evaluating(model, device, precision):
        with torch.no_grad():
            alone = [_pass(model, rows.slice(row, row + 1))[0] for row in range(len(rows))]
        _check_finite(inner, alone)
        try:
            together, foreign = _pass(model, rows, packed=packed, share=share)
        except ConfigError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever an architecture raises, rows cannot share a pass
            return " ".join(describe_error(error).split())
    if not bool((foreign == 0).all()):  # NaN is no zero
        return _MIXED
    if not same_within_rounding(together, torch.cat(alone), precision, next(inner.parameters()).dtype):
        return _DIFFERENT
    return "" if share or not _reads_ahead(model, rows.slice(0, 1), device, precision) else _AHEAD


def _reads_ahead(model: nn.Module, row: Batch, device: torch.device, precision: torch.dtype) -> bool:
    """Whether the states of a row's first half depend on later inputs."""
    with _evaluating(model, device, precision):
        _, later = _pass(model, row, early=True)
    return bool((later.nan_to_num() != 0).any())


@contextmanager
def _evaluating(model: nn.Module, device: torch.device, precision: torch.dtype) -> Iterator[None]:
    training, threads = model.training, torch.get_num_threads()
    model.eval()
    # So few tokens give several threads little to do, and on a busy machine these spin while they wait for one another.
    torch.set_num_threads(1)
    try:
        with torch.enable_grad(), autocast(device, precision):
            yield
    finally:
        torch.set_num_threads(threads)
        model.train(training)


def _longest(model: nn.Module) -> int:
    config: Any = plain_model(model).config
    return min(_LONGEST, getattr(config.get_text_config(), "max_position_embeddings", None) or _LONGEST)


def _vocabulary(model: nn.Module) -> int:
    inner: Any = plain_model(model)
    return inner.get_input_embeddings().weight.shape[0]


def _check_finite(model: nn.Module, rows: Sequence[Tensor]) -> None:
    """Raise ConfigError unless the hidden states of all rows are finite."""
    if all(bool(states.isfinite().all()) for states in rows):
        return
    wrong = next((name for name, parameter in model.named_parameters() if not parameter.isfinite().all()), None)
    reason = "" if wrong is None else f": its parameter {wrong} is not finite; copy its files again"
    raise ConfigError(f"{type(model).__name__} computes NaN or infinity for usual text{reason}")


def _rows(vocabulary: int, lengths: Sequence[int], prompts: Sequence[int], *, share: bool) -> Batch:
    """Rows of random text, in which loss begins after ``prompts`` tokens. With ``share``, the last two have the same
    prompt."""
    generator = torch.Generator().manual_seed(0)
    first, last = min(3, vocabulary - 1), min(vocabulary, _MOST_IDS)
    rows = [torch.randint(first, last, (length,), generator=generator) for length in lengths]
    if share:
        rows[-1][: prompts[-1]] = rows[-2][: prompts[-1]]
    tokens = Jagged.from_rows(rows)
    mask = torch.cat([torch.arange(length) >= prompt for length, prompt in zip(lengths, prompts, strict=True)])
    return Batch({fields.TOKENS: tokens, fields.LOSS_MASK: tokens.like(mask)})


def _pass(
    model: nn.Module, rows: Batch, *, packed: bool = False, share: bool = False, early: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the hidden states ``[K, H]`` of all rows, and the gradient of the last row's at the inputs of others.

    Where gradients are off, the gradient is empty. With ``early`` the gradient is that of the first half of the last
    row's states, and the inputs behind this half are others, too.
    """
    (micro,) = cut(rows, 10**9, packed=packed, share=share)
    inner: Any = plain_model(model)
    inputs: list[Tensor] = []
    hidden: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        inputs.append(output.detach().requires_grad_())
        return inputs[-1].clone()  # some models write into it

    with (
        inner.get_input_embeddings().register_forward_hook(keep),
        inner.get_output_embeddings().register_forward_hook(lambda module, args, output: hidden.append(args[0][0])),
    ):
        logits = run_model(model, micro).logits
    if not torch.is_grad_enabled():
        return hidden[0], hidden[0].new_zeros(0)
    start, end = micro.offsets[-2:].tolist()
    last_row = slice(start, (start + end) // 2 if early else end)
    directions = torch.arange(hidden[0][last_row].numel(), device=hidden[0].device).cos().view_as(hidden[0][last_row])
    # FSDP2 gathers the parameters of the backward pass when the gradient reaches what the whole model returned.
    value = (hidden[0][last_row].float() * directions).sum() + 0 * logits.sum()
    (gradient,) = torch.autograd.grad(value, inputs[:1])
    foreign = torch.ones(gradient.shape[:2], dtype=torch.bool, device=gradient.device).flatten()
    foreign[micro.select[last_row]] = False
    if isinstance(micro.packed, SharedPrompts):  # its prompt too
        foreign[micro.packed.key_places[int(micro.packed.key_offsets[-2]) :]] = False
    return hidden[0].detach(), gradient.flatten(0, 1)[foreign]
