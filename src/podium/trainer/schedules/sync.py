"""The synchronous schedule: one half after the other, one step after the other.

    generator, grader   [ collect 1 ]           [ collect 2 ]           [ collect 3 ]
    policy, critic …                 [ learn 1 ]             [ learn 2 ]             [ learn 3 ]
                                               ▲ evaluation and checkpoint, where they are due

``learn`` waits for the grades, ``collect`` for the weights that ``learn`` sent. So every completion is sampled by the
newest weights: the completions of step k have version k - 1. The two halves never run at the same time.
"""

from podium.runs.schedules import ScheduleDeclaration
from podium.trainer.schedules.steps import Steps


@ScheduleDeclaration(staleness=0)
def sync(steps: Steps) -> None:
    """Collect and learn in turns."""
    for step in steps:
        steps.learn(steps.collect(step))
