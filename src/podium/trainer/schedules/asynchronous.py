"""The asynchronous schedule: the generator does not wait for the policy, within a bound on staleness.

    generator, grader   [ collect 1 ........ ][ collect 4 ....
                        [ collect 2 ............ ][ collect 5
                        [ collect 3 .. ]    [ collect 6 ......
    policy, critic …                     [ learn 1 ][ learn 2 ]
                                                             ▲ evaluation and checkpoint, where they are due

With ``run.max_staleness`` k, the completions of up to k + 1 steps are drawn side by side. So a few long completions do
not leave the generator idle: those of the next steps are drawn beside them. New weights reach the generator between two
tokens, and completions go on with them. Collect of step s begins once step s - 1 - k is learned. So no token of step s
is older than version s - 1 - k, where ``sync`` has s - 1. No completion is dropped for being long: the steps are
learned in their order, and a step waits for its longest one. The failure of a later step ends that wait.
"""

from collections import deque
from concurrent.futures import Future

from podium.runs.schedules import ScheduleDeclaration
from podium.trainer.schedules.steps import Rollout, Steps


@ScheduleDeclaration(side_by_side=True, overlaps=True)
def asynchronous(steps: Steps) -> None:
    """Collect as many steps as the bound allows, and learn them in order."""
    coming: deque[Future[Rollout]] = deque()
    following = steps.first
    for step in steps:
        while following <= min(step + steps.max_staleness, steps.last):
            coming.append(steps.collect_ahead(following))
            following += 1
        steps.learn(steps.first_of(coming))
        coming.popleft()
