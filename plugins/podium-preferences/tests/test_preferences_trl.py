"""Losses of preferences beside TRL's own code, forward and gradient, where TRL can be imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from podium.config import build_config
from podium_preferences.config import PreferenceConfig, ScorerConfig
from podium_preferences.objective import PreferenceInputs, differentiate

trl: Any = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL's own

TOKENS, COUNT = 7, 3


def token_logprobs() -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the tokens of 3 better answers and 3 worse ones, 0 outside the answers, and their mask."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(TOKENS) >= torch.tensor([[1], [3], [5], [2], [4], [6]])
    return -3 * torch.rand(2 * COUNT, TOKENS, generator=generator, dtype=torch.float64) * mask, mask


def reference() -> torch.Tensor:
    return -8 * torch.rand(2 * COUNT, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def trainer_of(**fields: Any) -> Any:
    """What a method of a trainer reads of it."""
    accelerator = MagicMock(device=torch.device("cpu"))
    accelerator.gather = accelerator.gather_for_metrics = lambda values: values
    usual = {"ld_alpha": None, "precompute_ref_logps": True, "f_divergence_type": "reverse_kl", "use_weighting": False}
    settings = {"aux_loss_enabled": False, "loss_weights": [1.0], "_total_train_tokens": 0, "_tp_size": 1, **usual}
    trainer = MagicMock(accelerator=accelerator)
    for name, value in {**settings, **fields}.items():
        setattr(trainer, name, value)
    return trainer


def outputs_of(logprobs: torch.Tensor) -> Callable[..., Any]:
    """A model whose log-probabilities are these."""
    shown = torch.zeros_like(logprobs)
    figures = SimpleNamespace(log_probs=logprobs, entropy=shown, mean_logits=shown, is_top1=shown.bool())
    return lambda **_: figures


def dpo(logprobs: torch.Tensor, mask: torch.Tensor, kind: str, beta: float) -> torch.Tensor:
    ref_chosen, ref_rejected = reference().chunk(2)
    whole = torch.nn.functional.pad(mask, (1, 0))  # the first token is predicted by nothing
    inputs = {
        "input_ids": torch.zeros(whole.shape, dtype=torch.int64),
        "attention_mask": torch.ones(whole.shape),
        "completion_mask": whole.long(),
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    trainer = trainer_of(loss_types=[kind], beta=beta)
    return trl.DPOTrainer._compute_loss(trainer, outputs_of(logprobs), inputs, False)


def kto(logprobs: torch.Tensor, mask: torch.Tensor, mismatched: torch.Tensor, **weights: float) -> torch.Tensor:
    whole = torch.nn.functional.pad(mask, (1, 0))
    inputs = {
        "input_ids": torch.zeros(whole.shape, dtype=torch.int64),
        "attention_mask": torch.ones(whole.shape),
        "completion_mask": whole.long(),
        "label": torch.tensor([True] * COUNT + [False] * COUNT),
        "ref_logps": reference(),
        "ref_KL_logps": torch.zeros(len(mismatched), dtype=torch.float64),
    }
    trainer = trainer_of(loss_type="kto", calculate_KL=True, **weights)
    trainer._compute_kl_logps = lambda *_: mismatched
    return trl.KTOTrainer._compute_loss(trainer, outputs_of(logprobs), inputs, False)


def orpo(logprobs: torch.Tensor, mask: torch.Tensor, beta: float) -> torch.Tensor:
    """The paper's first term, and TRL's loss of the odds ratio."""
    theirs: Any = import_module("trl.experimental.orpo").ORPOTrainer
    chosen, rejected = (logprobs.sum(1) / mask.sum(1)).chunk(2)
    losses, *_ = theirs.odds_ratio_loss(trainer_of(beta=beta), chosen, rejected)
    return -chosen.mean() - losses.mean()


def simpo(logprobs: torch.Tensor, mask: torch.Tensor, beta: float, gamma: float) -> torch.Tensor:
    theirs: Any = import_module("trl.experimental.cpo").CPOTrainer
    chosen, rejected = (logprobs.sum(1) / mask.sum(1)).chunk(2)
    trainer = trainer_of(beta=beta, simpo_gamma=gamma, alpha=0.0, loss_type="simpo", label_smoothing=0.0)
    losses, *_ = theirs.cpo_loss(trainer, chosen, rejected)
    return losses.mean()


WEIGHTS = {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}
CASES: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "dpo": ({"beta": 0.3}, lambda logprobs, mask: dpo(logprobs, mask, "sigmoid", 0.3)),
    "ipo": ({"beta": 0.3}, lambda logprobs, mask: dpo(logprobs, mask, "ipo", 0.3)),
    "kto": (WEIGHTS, lambda logprobs, mask: kto(logprobs, mask, MISMATCHED, **WEIGHTS)),
    "orpo": ({"beta": 0.3}, lambda logprobs, mask: orpo(logprobs, mask, 0.3)),
    "simpo": ({"beta": 2.5, "gamma": 0.7}, lambda logprobs, mask: simpo(logprobs, mask, 2.5, 0.7)),
}
MISMATCHED = torch.tensor([0.4, 1.9, -0.2], dtype=torch.float64)


@pytest.mark.parametrize("loss", CASES)
def test_a_loss_and_its_gradient_are_those_of_trl(loss: str) -> None:
    options, theirs = CASES[loss]
    logprobs, mask = token_logprobs()
    logprobs.requires_grad_()
    expected = theirs(logprobs, mask)
    expected.backward()
    assert logprobs.grad is not None
    gradient = logprobs.grad * mask  # TRL's models write 0 outside the answers
    order = [0, 3, 1, 4, 2, 5]  # in which the answers of a pair stand together
    inputs = PreferenceInputs(
        values_A=logprobs.detach().sum(1)[order],
        chosen_A=torch.tensor([True, False] * COUNT),
        reference_A=reference()[order],
        lengths_A=mask.sum(1)[order],
        mismatched_M=MISMATCHED,
    )
    config = ScorerConfig(options=options)
    if loss != "bradley_terry":
        config = build_config(PreferenceConfig, {"options": options, "loss": loss})
    result, derivatives_A = differentiate(config, inputs)
    torch.testing.assert_close(result.losses.mean(), expected.detach().double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(derivatives_A[:, None] * mask[order], gradient[order], atol=1e-6, rtol=0)
