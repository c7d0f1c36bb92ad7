"""Generation by the method ``generate`` of ``transformers``, for any decoder-only architecture.

``generate`` calls a logits processor before it picks a token. The processor here draws the token, from the seed and
position of each completion, and leaves ``generate`` no choice but that token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from podium.devices import same_within_rounding
from podium.errors import ConfigError, GenerationError
from podium.exceptions import describe_error
from podium.rollout.engines.config import RECORDS, EngineConfig, OutputOptions
from podium.rollout.engines.constraints import Guided, restrict_logits
from podium.rollout.engines.draw import draw, leave_out, uniforms
from podium.rollout.engines.model import ModelEngine
from podium.rollout.engines.requests import Event, Failed, Finished, Request, Tokens, conclude
from podium.rollout.engines.short_twins import make_short_twin
from podium.rollout.engines.stops import Watch
from podium.rollout.sampling import SamplingParams
from podium.telemetry.progress import Counting


class TransformersEngine(ModelEngine):
    """Generates with ``model.generate``, up to ``config.max_sequences`` completions side by side.

    A batch holds waiting requests of equal sampling parameters, with prompts padded on the left. Models whose results
    depend on padding, such as those with a recurrent state, get prompts of one length at a time. At the first prompts
    of several lengths, the engine compares two short prompts together and alone to find out. Where the model has
    windows, chunks or the like, it also does so on a tiny twin in which these are of four tokens. The model's own
    generation settings are not used. In float32 the same seeds give the same ids in any batch, except where a draw
    falls within rounding of the boundary between two tokens.

    New requests and new weights enter between two batches, because ``generate`` keeps its own keys and values. A
    completion therefore has one version, new weights wait for the end of a batch, and a request with ``stream`` gets
    all of its tokens at that end.

    Args:
        config: ``max_sequences`` and ``dtype`` are used.
        model: Any ``transformers`` model with a decoder-only ``generate``.
    """

    auto_rank = 1
    constrains = True
    records = RECORDS["transformers"]
    options = OutputOptions

    def __init__(self, config: EngineConfig, model: nn.Module) -> None:
        super().__init__(config, model)
        declared = type(self).options  # an engine of the user's own may be derived from this one
        self._wide_output = False
        if declared is not None and issubclass(declared, OutputOptions):
            self._wide_output = config.read_options(declared).float32_output
        if self._wide_output and not isinstance(layer := self.model.get_output_embeddings(), nn.Linear):
            raise ConfigError(
                f"engine.options.float32_output: the output layer is a {type(layer).__name__}, not a linear layer; "
                "leave the option out"
            )

    @classmethod
    def supports(cls, model: nn.Module) -> str | None:
        model_config: Any = getattr(model, "config", None)
        if not hasattr(model, "generate") or getattr(model_config, "is_encoder_decoder", False):
            return f"it takes a decoder-only model with generate(), not a {type(model).__name__}"
        return None

    @torch.inference_mode()
    def advance(self, interrupted: Callable[[], bool]) -> list[Event]:
        with _sampling_mode(self.model), self.gate:
            alike = len({len(request.prompt) for request in self.waiting}) > 1 and not self._takes_padding
            requests = self.waiting.take(
                self.config.max_sequences, lambda one: (one.params, len(one.prompt) if alike else 0)
            )
            version = self.version
            drawing = self._draw(requests)
        ids_BT = torch.stack(drawing.ids, 1).cpu()
        logprobs_BT = torch.stack(drawing.logprobs, 1).cpu()
        events: list[Event] = []
        for row, (request, length) in enumerate(zip(requests, _lengths(ids_BT, requests[0].params), strict=True)):
            if (error := drawing.errors.get(row)) is not None:
                events.append(Failed(request.id, error))
                continue
            kept = [sets[row] for sets in drawing.kept[:length]] if drawing.kept else None
            guided = drawing.guided.get(row)
            masks = guided.masks[:length] if guided is not None and guided.restricts else None
            top = [rows[row] for rows in drawing.top[:length]] if drawing.top else None
            experts = drawing.experts_of(row, len(request.prompt), length)
            arrays = ids_BT[row, :length], logprobs_BT[row, :length]
            last = conclude(request, *arrays, version, kept, masks, top, experts)
            if request.stream and isinstance(last, Finished):
                draft = last.completion
                events.append(Tokens(request.id, draft.token_ids.tolist(), draft.logprobs.tolist(), version))
            events.append(last)
        return events

    def _draw(self, requests: Sequence[Request]) -> _Drawing:
        params = requests[0].params
        device = next(self.model.parameters()).device
        seeds_B = torch.tensor([request.seed for request in requests], device=device)
        guided = {
            row: request.constraint.begin(request.params.stop_token_ids, self.vocabulary)
            for row, request in enumerate(requests)
            if request.constraint is not None
        }
        texts = getattr(params, "stop", ())
        watches = [Watch(texts, self.decode, look_every=1) for _ in requests] if texts and self.decode else []
        processor = _Drawing(params, seeds_B, self.text_ids, self.count, guided, watches)
        stops = list(params.stop_token_ids) or None
        with _record_experts(self.model, processor.experts) if params.record_experts else nullcontext():
            self._generate(
                self.model, [request.prompt for request in requests], params.max_new_tokens, stops, processor
            )
        return processor

    def _generate(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        count: int,
        stops: list[int] | None,
        processor: LogitsProcessor,
    ) -> None:
        device = next(model.parameters()).device
        pad = getattr(model.config, "pad_token_id", None) or 0  # any id of the vocabulary would do
        width = max(map(len, prompts))
        paddings = [width - len(prompt) for prompt in prompts]
        tokens = [[pad] * padding + list(prompt) for padding, prompt in zip(paddings, prompts, strict=True)]
        mask = [[0] * padding + [1] * (width - padding) for padding in paddings]
        settings = GenerationConfig(
            do_sample=False, max_new_tokens=count, eos_token_id=stops, pad_token_id=pad, use_cache=True
        )
        layer = model.get_output_embeddings()
        with layer.register_forward_hook(_compute_in_float32) if self._wide_output else nullcontext():
            model.generate(
                torch.tensor(tokens, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=settings,
                logits_processor=LogitsProcessorList([processor]),
            )

    @cached_property
    def _takes_padding(self) -> bool:
        """Whether a prompt with padding beside a longer one gives the logits that it gives alone, also where both pass
        the model's windows, chunks and the like, which is tried on a tiny twin."""
        if getattr(self.model, "_is_stateful", False):
            return False
        reason = "" if self._same_with_padding(self.model) else "padding changes its logits"
        if not reason:
            try:
                twin: Any = make_short_twin(self.model)
                with nullcontext() if twin is None else _sampling_mode(twin):
                    same = twin is None or self._same_with_padding(twin)
                reason = "" if same else "padding changes its logits in texts beyond its windows, chunks or the like"
            except Exception as error:  # noqa: BLE001 - whatever an architecture raises that cannot be so small
                reason = f"what padding changes in long texts cannot be tried ({describe_error(error)})"
        if reason:
            logging.getLogger("podium").warning(
                "%s generates from prompts of one length at a time, because %s", type(self.model).__name__, reason
            )
        return not reason

    def _same_with_padding(self, model: Any) -> bool:
        """Whether two short prompts give the same logits together and alone."""
        vocabulary = min(model.get_input_embeddings().weight.shape[0], self.vocabulary, 1000)
        low, most = min(3, vocabulary - 1), min(16, self.positions or 16) - 2
        text = [low + (7 * index) % (vocabulary - low) for index in range(most)]
        prompts = [text, text[: most // 3 + 1]]
        alone = torch.cat([self._logits(model, [prompt]) for prompt in prompts])
        return same_within_rounding(self._logits(model, prompts), alone, next(model.parameters()).dtype)

    def _logits(self, model: Any, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits ``[2 * B, V]`` of two tokens after each prompt."""
        watching = _Watching()
        self._generate(model, prompts, 2, None, watching)
        return torch.stack(watching.logits, 1).flatten(0, 1)


def _compute_in_float32(layer: Any, args: Sequence[Tensor], output: Tensor) -> Tensor:
    """The output of a linear layer, computed again in float32."""
    return F.linear(args[0].float(), layer.weight.float(), None if layer.bias is None else layer.bias.float())


class _Watching(LogitsProcessor):
    """Remembers each step's logits ``[B, V]``, and lets token 0 follow."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self.logits.append(scores)
        return torch.nn.functional.one_hot(torch.zeros_like(input_ids[:, 0]), scores.shape[1]).log()


class _Drawing(LogitsProcessor):
    """Draws each step's tokens, remembers them, and masks every other token."""

    def __init__(
        self,
        params: SamplingParams,
        seeds_B: Tensor,
        text_ids: tuple[int, tuple[int, ...]] | None,
        count: Counting,
        guided: Mapping[int, Guided],
        watches: Sequence[Watch] = (),
    ) -> None:
        self._watches = watches
        self.guided, self.errors = guided, dict[int, GenerationError]()
        self._params, self._text_ids, self._count = params, text_ids, count
        self._stops = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=seeds_B.device)
        self._live_B = torch.ones_like(seeds_B, dtype=torch.bool)  # no stop token or text yet
        self._uniforms = uniforms(seeds_B, 0, params.max_new_tokens)
        self.ids: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self.kept: list[list[Tensor]] = []
        self.top: list[Tensor] = []
        self.experts: list[list[Tensor]] = []  # by router, of each forward pass

    @cached_property
    def _experts_BTC(self) -> Tensor:
        """The experts ``[B, T, C]`` of all layers, for the T places that went through the model."""
        layers = [
            [experts.view(len(self._live_B), -1, experts.shape[-1]) for experts in passes] for passes in self.experts
        ]
        return torch.cat([torch.cat(layer, 1) for layer in layers], -1).to("cpu", torch.int16)

    def experts_of(self, row: int, prompt: int, length: int) -> Tensor | None:
        """``Completion.experts`` of a row whose prompt and completion have these lengths; None if not recorded."""
        if not self.experts:
            return None
        start = self._experts_BTC.shape[1] - (len(self.ids) - 1) - prompt  # prompts end at one place
        return self._experts_BTC[row, start : start + prompt + length - 1].clone()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        logits = leave_out(scores.float(), self._text_ids)
        rows = [row for row in self.guided if row not in self.errors and self._live_B[row]]
        if rows:
            errors = restrict_logits(logits, rows, [self.guided[row] for row in rows])
            self.errors |= {row: error for row, error in zip(rows, errors, strict=True) if error is not None}
        result = draw(logits, self._params, self._uniforms[:, len(self.ids)])
        for row in rows:
            if row not in self.errors and (error := self.guided[row].accept(int(result.ids_B[row]))):
                self.errors[row] = error
        self._count.done += int(self._live_B.sum())
        self._live_B &= ~torch.isin(result.ids_B, self._stops)
        for row, id in enumerate(result.ids_B.tolist() if self._watches else ()):
            self._live_B[row] &= not self._watches[row].add([id])
        self.ids.append(result.ids_B)
        self.logprobs.append(result.logprobs_B)
        if result.kept_ids_BK is not None and result.kept_sizes_B is not None:
            order = result.kept_ids_BK.cpu()
            self.kept.append([order[row, :size].clone() for row, size in enumerate(result.kept_sizes_B.tolist())])
        if result.top_B2J is not None:
            self.top.append(result.top_B2J)
        chosen_B = result.ids_B
        if self._watches and len(self._stops):  # a row that a text ended goes on as one that a token ended
            chosen_B = torch.where(self._live_B, chosen_B, self._stops[0])
        return torch.full_like(scores, float("-inf")).scatter_(1, chosen_B.unsqueeze(1), 0.0)


@contextmanager
def _record_experts(model: nn.Module, recorded: list[list[Tensor]]) -> Iterator[None]:
    """Add to ``recorded`` a list of what each router chose in each forward pass. Raises ConfigError without routers."""
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    if not routers:
        raise ConfigError(
            f"record_experts: {type(model).__name__} is no mixture of experts with routers of transformers"
        )
    recorded += [[] for _ in routers]

    def record(experts: list[Tensor], router: nn.Module, _args: object, output: Any) -> None:
        if not isinstance(output, tuple) or len(output) != 3 or output[2].dtype != torch.int64:
            raise ConfigError(f"record_experts: {type(router).__name__} does not return logits, weights and choices")
        experts.append(output[2])

    with ExitStack() as hooks:
        for router, experts in zip(routers, recorded, strict=True):
            hooks.enter_context(router.register_forward_hook(partial(record, experts)))
        yield


def _lengths(ids_BT: Tensor, params: SamplingParams) -> list[int]:
    """Tokens of each row up to and with its first stop token."""
    hits = torch.isin(ids_BT, torch.tensor(params.stop_token_ids, dtype=torch.int64))
    first = hits.to(torch.int8).argmax(1) + 1
    return torch.where(hits.any(1), first, ids_BT.shape[1]).tolist()


@contextmanager
def _sampling_mode(model: Any) -> Iterator[None]:
    """No dropout, and none of the generation settings that the model carries; as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    settings = model.generation_config
    model.eval()
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = settings
        for module in training:
            module.training = True
