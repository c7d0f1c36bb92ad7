"""Run a user's code in a process that can be killed."""

from podium.processes.supervisor import Supervisor
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

__all__ = [
    "Supervisor",
    "become_subreaper",
    "children_of",
    "descendants_of",
    "describe_exit",
    "end_of",
    "is_ending",
    "is_stopped",
    "kill",
    "kill_marked",
]
