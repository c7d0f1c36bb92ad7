"""Where processes are that do not answer, and what the stacks of a group's ranks say together."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from podium.processes import descendants_of

_DUMP_S = 5.0
_COLLECTIVE = re.compile(r'distributed_c10d\.py", line \d+, in (\w+)|(\w+) \(\S*distributed_c10d\.py')


def outside_stack(pid: int) -> str:
    """Return the Python stack of a worker process's main thread, innermost first, read from outside by py-spy.

    The process need not run Python code, and may be stopped by a signal. The stack is "" without py-spy, without the
    right to look, and for a process that is not below this one.
    """
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None or pid not in descendants_of(os.getpid()):
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True, timeout=_DUMP_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    threads = done.stdout.split("Thread ")
    main = next((thread for thread in threads[1:] if "MainThread" in thread.partition("\n")[0]), "")
    lines = [line.strip() for line in main.splitlines()[1:] if line.strip()]
    return "\n".join(itertools.takewhile(lambda line: not line.startswith("WorkerProcess."), lines))


def is_inside_collective(stack: str) -> bool:
    """Whether a stack of Python leads into a function of torch.distributed's collectives."""
    return _COLLECTIVE.search(stack) is not None


def collective_of(statuses: Mapping[int, str]) -> str:
    """Return who waits in a collective and who has not entered it, by what each rank runs; "" where nobody does."""
    inside = {rank: match for rank, status in statuses.items() if (match := _COLLECTIVE.search(status))}
    outside = sorted(statuses.keys() - inside.keys())
    if not inside:
        return ""
    names = " or ".join(sorted({match[1] or match[2] for match in inside.values()}))
    rest = f"ranks {outside} have not entered it" if outside else "all ranks that have not answered are in it"
    return f"ranks {sorted(inside)} wait in {names}; {rest}"
