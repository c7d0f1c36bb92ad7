"""The loss of a reward model."""

import torch.nn.functional as F
from pydantic import Field

from podium.algorithms.declarations import Declaration
from podium.config import section
from podium_preferences.objective import PreferenceInputs, PreferenceLoss

__all__ = ["BradleyTerryOptions", "bradley_terry"]


@section("algorithm.options")
class BradleyTerryOptions:
    """The constants of a reward model."""

    center: float = Field(default=0.0, ge=0, le=1e3)
    """The square of the sum of a pair's scores, times this coefficient, is added to the loss, so that scores stay
    around 0."""


@Declaration(options=BradleyTerryOptions, source="Ouyang et al. 2022, arXiv:2203.02155")
def bradley_terry(inputs: PreferenceInputs, options: BradleyTerryOptions) -> PreferenceLoss:
    """``-log sigmoid(r_chosen - r_rejected - m) + center (r_chosen + r_rejected)²`` of each pair.

    Bradley and Terry 1952, as in Ouyang et al. 2022, arXiv:2203.02155, equation 1. m is the margin of the pair, which
    the data may have: Touvron et al. 2023, "Llama 2", arXiv:2307.09288, equation 2. The square is that of Eisenstein et
    al. 2023, arXiv:2312.09244, section 2, who use 0.01.
    """
    chosen_P, rejected_P = inputs.split(inputs.values_A)
    margins_P = chosen_P - rejected_P
    if inputs.margins_P is not None:
        margins_P = margins_P - inputs.margins_P
    losses_P = -F.logsigmoid(margins_P) + options.center * (chosen_P + rejected_P).square()
    return PreferenceLoss(losses_P, inputs.values_A)
