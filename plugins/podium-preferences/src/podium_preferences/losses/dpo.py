"""Direct preference optimization."""

import torch.nn.functional as F
from pydantic import Field

from podium.algorithms.declarations import Declaration
from podium.config import section
from podium_preferences.objective import PreferenceInputs, PreferenceLoss

__all__ = ["DPOOptions", "dpo"]


@section("algorithm.options")
class DPOOptions:
    """The constants of DPO: Rafailov et al. 2023, arXiv:2305.18290, appendix B."""

    beta: float = Field(default=0.1, gt=0, le=1e3)
    """The policy stays the closer to the reference, the larger this coefficient is."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """This share of the preferences is taken to be wrong (conservative DPO)."""


@Declaration(options=DPOOptions, source="Rafailov et al. 2023, arXiv:2305.18290, appendix B")
def dpo(inputs: PreferenceInputs, options: DPOOptions) -> PreferenceLoss:
    """``-(1 - ε) log sigmoid(h) - ε log sigmoid(-h)`` of each pair, ``h = β (log-ratio of chosen - of rejected)``.

    A log-ratio is ``log π(y|x) - log π_ref(y|x)``, a sum over the answer's tokens. Rafailov et al. 2023, "Direct
    Preference Optimization", arXiv:2305.18290, equation 7. ε is ``label_smoothing``: Mitchell 2023, "A note on DPO with
    noisy preferences", equation 3. The implied reward is β times the log-ratio.
    """
    rewards_A = options.beta * inputs.log_ratios_A
    chosen_P, rejected_P = inputs.split(rewards_A)
    margins_P, noise = chosen_P - rejected_P, options.label_smoothing
    losses_P = -(1 - noise) * F.logsigmoid(margins_P) - noise * F.logsigmoid(-margins_P)
    return PreferenceLoss(losses_P, rewards_A)
