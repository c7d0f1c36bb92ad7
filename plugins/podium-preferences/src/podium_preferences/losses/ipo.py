"""Identity preference optimization."""

from pydantic import Field

from podium.algorithms.declarations import Declaration
from podium.config import section
from podium_preferences.objective import PreferenceInputs, PreferenceLoss

__all__ = ["IPOOptions", "ipo"]


@section("algorithm.options")
class IPOOptions:
    """The constants of IPO."""

    beta: float = Field(default=0.1, gt=0, le=1e3)
    """The policy stays the closer to the reference, the larger this coefficient is. The paper calls it τ."""
    average: bool = True
    """Log-ratios are means over an answer's tokens. false takes their sums, as the paper does."""


@Declaration(options=IPOOptions, source="Azar et al. 2023, IPO, arXiv:2310.12036; value of TRL")
def ipo(inputs: PreferenceInputs, options: IPOOptions) -> PreferenceLoss:
    """``(log-ratio of chosen - log-ratio of rejected - 1 / (2 β))²`` of each pair.

    Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human Preferences", arXiv:2310.12036,
    equation 17. The paper's log-ratios are sums over an answer's tokens. TRL takes their means, by which the paper's
    results were computed, as its authors told TRL's. So does ``average``. The implied reward is β times the log-ratio.
    """
    ratios_A = inputs.token_means(inputs.log_ratios_A) if options.average else inputs.log_ratios_A
    chosen_P, rejected_P = inputs.split(ratios_A)
    losses_P = (chosen_P - rejected_P - 1 / (2 * options.beta)).square()
    return PreferenceLoss(losses_P, options.beta * ratios_A)
