"""Whether the device computes what a CPU computes in float64: generation, packed and padded rows, the output layer.

The references in float64 are computed by the stage itself, on the CPU, before the device is asked. They take under a
second for models of this size, so that no file of figures has to be kept in step with the code that it checks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench.gpu.clock import device_s, reset_peak
from bench.gpu.shapes import TOKENIZER, model_config
from bench.gpu.stage import Stage
from podium.algorithms import TokenLoss, loss_weights
from podium.data import Batch, Jagged, fields
from podium.devices import autocast, memory_peak_bytes
from podium.models import ModelConfig, load_model
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.sampling import SamplingParams
from podium.training import OptimConfig, ParallelConfig, TrainEngine
from podium.training.micro_batches import MicroBatch, cut
from podium.training.scoring import score_tokens
from tests.unit.training import families as tiny

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "qwen3_moe")
PROMPTS = [[4, 9, 15], [7, 5, 12, 30, 31, 8, 22, 17, 40, 3, 6], [20, 21, 22, 23, 24, 25]]
LENGTHS = (5, 9, 30, 2, 17, 12, 23, 3, 41, 28)
# Limits on differences of log-probabilities, in nats, and on relative errors of gradients.
NATS = {torch.float32: 1e-4, torch.bfloat16: 0.1}
GRADIENT = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def families(stage: Stage) -> None:
    """The native engine's log-probabilities against a forward pass by transformers, for six families."""
    for family in FAMILIES:
        for dtype in (torch.float32, torch.bfloat16):
            stage.part(f"{family}_{_name(dtype)}", lambda family=family, dtype=dtype: _family(stage, family, dtype))


def packed(stage: Stage) -> None:
    """Packed and padded rows on the device against float64 on the CPU: log-probabilities and gradients."""
    config = ModelConfig(config={**_tiny("qwen3"), "model_type": "qwen3"}, tokenizer=TOKENIZER, seed=3)
    batch = random_rows(LENGTHS, 48)
    expected = _reference(load_model(config), batch)
    for dtype in (torch.float32, torch.bfloat16):
        for batching in ("packed", "padded"):
            name = f"{batching}_{_name(dtype)}"
            stage.part(
                name, lambda name=name, d=dtype, b=batching: _trained(stage, name, config, batch, expected, d, b)
            )


def head(stage: Stage) -> None:
    """The output layer over 151,936 words: equal to a plain one in float64, and what each token adds to its memory."""
    words, lengths = (512, (64, 256)) if stage.dry else (151_936, (4096, 16_384))
    width = 64 if stage.dry else 896
    stage.part("equal", lambda: _plain_head(stage, words, width))
    peaks: dict[int, float] = {}
    for tokens in lengths:

        def cost(tokens: int = tokens) -> None:
            peaks[tokens] = _head_cost(stage, words, width, tokens)

        stage.part(f"tokens_{tokens}", cost)
    if stage.on_gpu and len(peaks) == len(lengths):
        stage.expect("growth", rows_a_token(peaks, words), 0.5, "rows of float32 logits for each further token")


def rows_a_token(peaks: Mapping[int, float], words: int) -> float:
    """How much memory each further token takes, in rows of logits, from peaks in GiB by the number of tokens.

    Whole logits take several rows a token. In chunks there remain the activations of the layers below, a fraction.
    """
    fewest, most = min(peaks), max(peaks)
    return (peaks[most] - peaks[fewest]) * 2**30 / (most - fewest) / (4 * words)


def _family(stage: Stage, family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **_tiny(family)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # far from their defaults, so that each of them matters
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if "norm" in name else 0.1)
    model = model.to(stage.device, dtype).eval()
    reference = copy.deepcopy(model)  # the engine rearranges the storage of its own
    engine = make_engine(EngineConfig(name="native", dtype=_name(dtype)), model)
    engine.refresh(0)
    worst = 0.0
    for temperature in (0.0, 0.7):
        params = SamplingParams(max_new_tokens=4 if stage.dry else 16, temperature=temperature)
        for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, params, range(3)), strict=True):
            sequence = torch.tensor([[*prompt, *completion.token_ids.tolist()]], device=stage.device)
            with torch.no_grad():
                logits = reference(sequence, use_cache=False).logits[0, len(prompt) - 1 : -1].float().cpu()
            chosen = completion.token_ids[:, None]
            expected = torch.log_softmax(logits / (temperature or 1.0), -1).gather(1, chosen)[:, 0]
            worst = max(worst, float((completion.logprobs - expected).abs().max()))
    stage.expect(f"{family}_{_name(dtype)}", worst, NATS[dtype] * (3 if dtype == torch.bfloat16 else 1), "nats")


def _trained(
    stage: Stage, name: str, config: ModelConfig, batch: Batch, expected: Mapping[str, Tensor], dtype: torch.dtype,
    batching: Any,
) -> None:  # fmt: skip
    parallel = ParallelConfig(batching=batching, precision=_name(dtype), micro_batch_tokens=80)
    engine = TrainEngine(
        load_model(config, stage.device), optim=OptimConfig(lr=0.0, grad_clip=0.0), parallel=parallel,
        device=stage.device,
    )  # fmt: skip
    if engine.batching != batching:
        raise RuntimeError(f"rows are {engine.batching}: {engine.note}")

    def score(micro: MicroBatch) -> dict[str, Tensor]:
        return {"logprobs": score_tokens(engine.model, batch, micro).logprobs}

    found = engine.evaluate(batch, score, ["logprobs"])["logprobs"].values
    mask = batch.jagged(fields.LOSS_MASK).values
    difference = (found.double() - expected["logprobs"])[mask].abs()
    stage.expect(f"{name}_logprobs", float(difference.max()), NATS[dtype], "nats from float64, at most")
    engine.step(batch, lambda micro: TokenLoss(-score(micro)["logprobs"]))
    gradient = torch.cat([one.detach().flatten() for one in engine.parallel.gradients()]).cpu().double()
    error = float((gradient - expected["gradient"]).norm() / expected["gradient"].norm())
    stage.expect(f"{name}_gradient", error, GRADIENT[dtype], "relative error to float64")


def _reference(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Log-probabilities of all tokens ``[N]``, and the gradient of the weighted sum, row by row in float64."""
    model = model.double()
    columns: list[Tensor] = []
    for row in batch.jagged(fields.TOKENS).unbind():
        logits = model(row[None], use_cache=False).logits[0, :-1]
        picked = torch.log_softmax(logits, -1).gather(1, row[1:, None])[:, 0]
        columns.append(torch.cat([torch.zeros(1, dtype=torch.float64), picked]))
    logprobs = torch.cat(columns)
    (-(batch.jagged(fields.LOSS_WEIGHTS).values.double() * logprobs).sum()).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return {"logprobs": logprobs.detach(), "gradient": gradient}


def random_rows(lengths: tuple[int, ...], words: int) -> Batch:
    """Rows of random tokens; all but the first carry loss."""
    generator = torch.Generator().manual_seed(0)
    rows = Jagged.from_rows([torch.randint(3, words, (length,), generator=generator) for length in lengths])
    mask = torch.cat([torch.arange(length) > 0 for length in lengths])
    weights = rows.like(loss_weights(mask, rows.offsets))
    return Batch({fields.TOKENS: rows, fields.LOSS_MASK: rows.like(mask), fields.LOSS_WEIGHTS: weights})


def _plain_head(stage: Stage, words: int, width: int) -> None:
    """Loss and gradients of 512 tokens against float64, where the logits are computed all at once."""
    tokens = 32 if stage.dry else 512
    model, batch, micro = _head_model(stage, words, width, tokens)
    reference = copy.deepcopy(model).double()
    (-score_tokens(model, batch, micro).logprobs.sum()).backward()
    logits = reference(micro.input_ids, use_cache=False).logits[0]
    (-torch.log_softmax(logits, -1).gather(1, micro.targets[:, None]).sum()).backward()
    for (name, own), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        error = float((own.grad.double() - theirs.grad).norm() / theirs.grad.norm())
        if "embed" in name or "norm" in name:
            stage.expect(f"gradient_{name.removeprefix('model.')}", error, 1e-4, "relative error to float64")


def _head_cost(stage: Stage, words: int, width: int, tokens: int) -> float:
    """Seconds and the peak of memory of one forward and backward pass; returns the peak above the model, in GiB."""
    model, batch, micro = _head_model(stage, words, width, tokens)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # made before, so that the peak is the pass's own

    def work() -> None:
        with autocast(stage.device, torch.bfloat16):
            scores = score_tokens(model, batch, micro, entropy=True)
        (-scores.logprobs.sum()).backward()

    work()
    reset_peak(stage.device)
    before = memory_peak_bytes(stage.device)
    work()
    peak = (memory_peak_bytes(stage.device) - before) / 2**30
    seconds = device_s(work, stage.device, repetitions=1 if stage.dry else 5, warmups=1)
    stage.figure(f"pass_{tokens}", seconds * 1e3, "ms forward and backward")
    if stage.on_gpu:
        stage.figure(f"peak_{tokens}", peak, "GiB above the model")
    return peak


def _head_model(stage: Stage, words: int, width: int, tokens: int) -> tuple[Any, Batch, MicroBatch]:
    """A model of one small layer, so that the output layer is nearly all of it."""
    shape = {**model_config(stage), "vocab_size": words, "hidden_size": width, "num_hidden_layers": 1}
    shape |= {"intermediate_size": 2 * width, "max_position_embeddings": 32_768}
    model = load_model(ModelConfig(config=shape, tokenizer=TOKENIZER), stage.device)
    batch = random_rows((tokens + 1,), words).to(stage.device)
    (micro,) = cut(batch, 10**9, packed=False)
    return model, batch, micro


def _tiny(family: str) -> dict[str, Any]:
    shapes = {**tiny.APART, "qwen2": tiny.APART["llama"]}
    shapes["smollm3"] = {**tiny.APART["llama"], "no_rope_layers": [1, 0]}
    return shapes[family]


def _name(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")
