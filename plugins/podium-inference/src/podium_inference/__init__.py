"""Models that are used and not trained: ``podium eval``, ``podium sample`` and ``podium export``."""

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium_inference.best_of_n import BestOfN as BestOfN, draw_best as draw_best
    from podium_inference.evaluation import evaluate_model as evaluate_model, open_sampler as open_sampler
    from podium_inference.export import export_model as export_model, open_model as open_model
    from podium_inference.suites import PreparedSuite as PreparedSuite
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
