"""Kahneman-Tversky optimization, of answers with labels."""

import torch
from pydantic import Field

from podium.algorithms.declarations import Declaration
from podium.config import section
from podium_preferences.objective import PreferenceInputs, PreferenceLoss

__all__ = ["KTOOptions", "kto"]


@section("algorithm.options")
class KTOOptions:
    """The constants of KTO: Ethayarajh et al. 2024, arXiv:2402.01306, section 4."""

    beta: float = Field(default=0.1, gt=0, le=1e3)
    """The policy stays the closer to the reference, the larger this coefficient is."""
    desirable_weight: float = Field(default=1.0, ge=0, le=1e6)
    """The losses of desirable answers have this weight. The paper keeps its product with their number within 1 to 4/3
    times that of undesirable ones."""
    undesirable_weight: float = Field(default=1.0, ge=0, le=1e6)
    """The losses of undesirable answers have this weight."""


@Declaration(options=KTOOptions, source="Ethayarajh et al. 2024, KTO, arXiv:2402.01306, section 4.2")
def kto(inputs: PreferenceInputs, options: KTOOptions) -> PreferenceLoss:
    """``λ (1 - sigmoid(±β (log-ratio - z)))`` of each answer, plus of a desirable one, minus of an undesirable one.

    Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv:2402.01306, equation 8. z
    is the mean log-ratio of mismatched answers, each after the prompt of another row, or 0 if that is negative: an
    estimate of ``KL(policy || reference)`` that has no gradient. It is over the whole step, as in TRL, where the paper
    takes a micro-batch. The implied reward is β times the log-ratio.
    """
    ratios_A = inputs.log_ratios_A
    mismatched_M = inputs.mismatched_M
    divergence = ratios_A.new_zeros(())
    if mismatched_M is not None and len(mismatched_M):
        divergence = mismatched_M.detach().mean().clamp(min=0)
    sign_A = torch.where(inputs.chosen_A, 1.0, -1.0).to(ratios_A.dtype)
    weight_A = torch.where(inputs.chosen_A, options.desirable_weight, options.undesirable_weight).to(ratios_A.dtype)
    losses_A = weight_A * (1 - torch.sigmoid(sign_A * options.beta * (ratios_A - divergence)))
    return PreferenceLoss(losses_A, options.beta * ratios_A)
