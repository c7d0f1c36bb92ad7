"""What every test shares: one thread a process, and the marks for what this machine may lack."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import secrets
import signal
from typing import Any, ClassVar

# Before torch is imported anywhere: tests run beside one another and start workers, which inherit this. Two torch
# threads in each of several processes on a small machine make everything an order of magnitude slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two processes of vLLM may share a core
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# One token for all of Ray's clusters here: by itself Ray wants one of an embedded cluster, which it writes to the home
# directory, and none of others, and a process keeps to what it did first.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# Ray gives its workers a niceness of 15: beside two busy processes of other tests they get a thirtieth of a core, and
# what takes a second takes minutes.
os.environ.setdefault("RAY_worker_niceness", "0")
# As Podium has it of the clusters that it starts; tests start others. No test needs Ray's usage report.
os.environ.setdefault("RAY_enable_worker_prestart", "0")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# A shell starts its background jobs with SIGINT ignored, which all processes below inherit: no Ctrl-C would reach the
# programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest


def missing_requirement(mark: str) -> str | None:
    """Why tests with `mark` cannot run here, or None if they can."""
    if mark in ("ray", "monarch", "vllm"):
        return None if importlib.util.find_spec(mark) else f"{mark} is not installed: pip install 'podium[{mark}]'"
    import torch  # only when a gpu test was collected: importing it takes longer than most tests

    return None if torch.cuda.is_available() else "no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run here, each with a reason that -ra counts and prints at the end.

    Tests with Ray come last: Ray leaves threads, children and unclosed files in its process, which others count.
    """
    items.sort(key=lambda item: item.get_closest_marker("ray") is not None)
    for item in items:
        with_ray = item.get_closest_marker("ray") is not None
        if with_ray:
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
    for mark in ("ray", "monarch", "vllm", "gpu"):
        marked = [item for item in items if item.get_closest_marker(mark)]
        if marked and (reason := missing_requirement(mark)):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `make test`, give consecutive tests of a file to the same process, whichever has time, in their order.

    So the clusters of a file are started once, and no process runs tests without Ray after tests with Ray. Of three
    processes or more, the first runs only those with Ray: they wait for much, and several clusters at a time are slow.
    ``--dist loadgroup`` of pytest-xdist 3.8 groups nothing under pytest 9.2, which ignores the names that it gives.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        units: ClassVar[dict[str, str]] = {}
        with_ray: ClassVar[set[str]] = set()
        ray_node: Any = None

        def _split_scope(self, nodeid: str) -> str:
            if not self.units:
                files = [one.partition("::")[0] for one in self.collection or ()]
                begins = [file != before for before, file in itertools.pairwise(["", *files])]
                self.units.update(zip(self.collection or (), map(str, itertools.accumulate(begins)), strict=True))
                seen, again = set[str](), False
                for unit, (file, _) in enumerate(itertools.groupby(files), 1):
                    again = again or file in seen  # a file's tests with Ray come after those of all files without
                    seen.add(file)
                    self.with_ray.update([str(unit)] * again)
            return self.units[nodeid]

        def _assign_work_unit(self, node: Any) -> None:
            if self._is_for_ray(node) and (unit := next(filter(self.with_ray.__contains__, self.workqueue), None)):
                self.workqueue.move_to_end(unit, last=False)
            super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            if self._is_for_ray(node) and self.with_ray.isdisjoint(self.workqueue):
                node.shutdown()
            super()._reschedule(node)

        def _is_for_ray(self, node: Any) -> bool:
            if self.ray_node is None and len(self.nodes) > 2:
                self.ray_node = self.nodes[0]
            return bool(self.with_ray) and node is self.ray_node

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """What was imported stays: without it, the many collections that tests ask for look only at what tests made."""
    gc.freeze()
