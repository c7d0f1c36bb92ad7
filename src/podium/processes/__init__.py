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

Five parts of Podium run a user's code this way, over frames of one format, and differ in who decides:

    rewards            The supervisor is a dispatcher that hands out items and keeps a deadline for each. Its children
                       have a limit of memory, and see no secrets of the environment.
    sessions           A fork server starts and kills what the worker asks for. A session sends requests to the worker.
    tools              The supervisor has one child for one call, and ends with it. It sees no secrets either.
    worker processes   A fork server starts them. The messages of calls bring descriptors of shared memory and keep the
                       bounds that the kernel gives them, so they are no frames: see backends/local/wire.py.
    other Pythons      The command of an environment without Podium has no supervisor. It speaks frames by itself.

Rewards and tools are kept from secrets that they do not name. Environments and workers need keys, as those of judges
and trackers.
"""

from podium.processes.channel import (
    HEADER as HEADER,
    Channel as Channel,
    Frame as Frame,
    FrameError as FrameError,
    Requests as Requests,
    make_frame as make_frame,
    read_frame as read_frame,
)
from podium.processes.fork_server import ForkServer as ForkServer, serve_forks as serve_forks
from podium.processes.launcher import (
    Launched as Launched,
    command as command,
    end_launched as end_launched,
    import_path as import_path,
    make_private_directory as make_private_directory,
    open_log as open_log,
    open_standard_streams as open_standard_streams,
    temporary_directory as temporary_directory,
    working_directory as working_directory,
)
from podium.processes.limits import (
    LARGEST_KEPT as LARGEST_KEPT,
    LONGEST_BODY as LONGEST_BODY,
    START_LIMIT_S as START_LIMIT_S,
    explain_limit as explain_limit,
    limit_memory as limit_memory,
    raise_descriptor_limit as raise_descriptor_limit,
)
from podium.processes.secret_handover import (
    close_memory as close_memory,
    hide_secrets as hide_secrets,
    open_own as open_own,
)
from podium.processes.supervisor import Supervisor as Supervisor, supervise as supervise
from podium.processes.table import (
    become_subreaper as become_subreaper,
    children_of as children_of,
    descendants_of as descendants_of,
    describe_exit as describe_exit,
    end_of as end_of,
    is_ending as is_ending,
    is_stopped as is_stopped,
    kill as kill,
    kill_marked as kill_marked,
)
