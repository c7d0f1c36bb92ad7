"""Run a user's code in a process that can be killed.

    controller ──launches──▶ supervisor ──forks──▶ child ──starts──▶ anything, in whatever session
        │  ▲                    │   ▲                │
        │  └──── end of file ───┘   └─── SIGCHLD ────┘
        └─ closes the channel, or ends: the supervisor kills all that is below it, and ends

Who starts whom: :class:`Launched` starts a fresh interpreter whose standard input is a :class:`Channel`. There
:func:`supervise` loads the user's code once, and a :class:`Supervisor` forks the children that run it.

Who watches whom: the supervisor sees the end of its children by SIGCHLD, and the end of its controller by the end of
the channel and by its parent's process id. The kernel tells a child that its supervisor has ended (PDEATHSIG), and the
controller by the end of the channel.

Who ends whom: the controller kills a child through its supervisor, which alone knows that a process id still means the
child. Each child is a subreaper, so that what a child has started stays below it, and the supervisor kills that when
the child has ended. Where a supervisor was killed itself, the controller kills what carries the mark in its environment
that only this supervisor's descendants have.

Five parts of Podium run a user's code this way. What differs is who decides about the children:

    rewards       the dispatcher is the supervisor. It hands out items, and keeps a deadline for each
    sessions      a fork server. A session asks its client in the worker, which decides when the session is over
    tools         one child for one call. Supervisor and child end with the call
    worker        a fork server. Its children talk to the controller through sockets of their own, whose messages carry
    processes     descriptors of shared memory and have no length prefix: see backends/local/wire.py
    other         a command in another Python environment, which has no Podium. It has no supervisor, and speaks frames
    interpreters

Frames, the filter of secrets, limits of time, memory, descriptors and message length are the same for all of them.
"""

from podium.processes.channel import HEADER, Channel, Frame, FrameError, Requests, make_frame, read_frame
from podium.processes.environment import find_secrets
from podium.processes.fork_server import ForkServer, serve_forks
from podium.processes.launcher import Launched, command, import_path, working_directory
from podium.processes.limits import LONGEST_BODY, START_LIMIT_S, limit_memory, raise_descriptor_limit
from podium.processes.supervisor import Supervisor, supervise
from podium.processes.table import (
    become_subreaper,
    children_of,
    descendants_of,
    describe_exit,
    end_of,
    is_ending,
    is_stopped,
    kill,
    kill_marked,
)

__all__ = ["HEADER", "LONGEST_BODY", "START_LIMIT_S", "Channel", "ForkServer", "Frame", "FrameError", "Launched"]
__all__ += ["Requests", "Supervisor"]
__all__ += ["become_subreaper", "children_of", "command", "descendants_of", "describe_exit", "end_of", "find_secrets"]
__all__ += ["import_path", "is_ending", "is_stopped", "kill", "kill_marked", "limit_memory", "make_frame"]
__all__ += ["raise_descriptor_limit", "read_frame", "serve_forks", "supervise", "working_directory"]
