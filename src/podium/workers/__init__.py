"""Where models and algorithms meet the runtime: policy, critic, reference, generator and estimator."""

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium.workers.critic import Critic as Critic
    from podium.workers.estimator import Estimator as Estimator
    from podium.workers.generator import Generator as Generator
    from podium.workers.learner import Learner as Learner
    from podium.workers.policy import Policy as Policy
    from podium.workers.reference import (
        FollowingReference as FollowingReference,
        Reference as Reference,
        Teacher as Teacher,
    )
    from podium.workers.reward_model import RewardModel as RewardModel
    from podium.workers.weight_sync import (
        ColocatedSync as ColocatedSync,
        StreamedSync as StreamedSync,
        WeightSync as WeightSync,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
