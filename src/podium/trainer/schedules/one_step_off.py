"""The schedule that is one step off: while a step is learned, the completions of the next one are drawn.

    generator, grader   [ collect 1 ][ collect 2 ]  [ collect 3 ]  [ collect 4 ]
    policy, critic …                 [   learn 1   ][   learn 2   ][   learn 3   ]
                                                  ▲ evaluation and checkpoint, where they are due

The completions of step k are drawn from version k - 2, or the last of their tokens from version k - 1 if they take
longer than ``learn`` of the step before. So no token is more than one version older than those of ``sync``.
"""

from podium.runs.schedules import ScheduleDeclaration
from podium.trainer.schedules.steps import Steps


@ScheduleDeclaration(staleness=1, overlaps=True)
def one_step_off(steps: Steps) -> None:
    """Collect step k + 1 while step k is learned."""
    coming = steps.collect_ahead(steps.first)
    for step in steps:
        rollout = coming.result()
        if step < steps.last:
            coming = steps.collect_ahead(step + 1)
        steps.learn(rollout)
