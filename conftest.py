"""What every test shares: one thread a process, and the marks for what this machine may lack."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import secrets
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

# Before torch is imported anywhere: tests run beside one another and start workers, which inherit this. Two torch
# threads in each of several processes on a small machine make everything an order of magnitude slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two processes of vLLM may share a core
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks another hub than its own: one that does not answer takes seconds
os.environ.pop("PYTHONUNBUFFERED", None)  # with it lines are cut into others
# Images of containers often set it. Each interpreter would compile Podium, and each pytest its tests, anew.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
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

# The record of the code that runs name, which is kept for the user, is one of these tests alone.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="podium-tests-state-")

# A shell starts its background jobs with SIGINT ignored, which all processes below inherit: no Ctrl-C would reach the
# programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

from tests import everyday, isolation, scheduling, warm_python
from tests.ray_selection import RaySelection

# What is started by nohup or in the background of a script ignores these, and so does all that the tests start.
for _number, _action in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _action)

# A failed assertion of a contract suite shows its values, as one of a test does.
CONTRACTS = Path(__file__).parent / "plugins" / "podium-testing" / "src" / "podium_testing"
pytest.register_assert_rewrite(*(f"podium_testing.{path.stem}" for path in CONTRACTS.glob("[a-z]*.py")))
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


def missing_requirement(mark: str) -> str | None:
    """Why tests with `mark` cannot run here, or None if they can."""
    if mark in ("ray", "vllm"):
        if not importlib.util.find_spec(f"podium_{mark}"):
            return f"podium-{mark} is not installed: pip install --no-deps -e plugins/podium-{mark}"
        return None if importlib.util.find_spec(mark) else f"{mark} is not installed: pip install {mark}"
    import torch  # only when a gpu test was collected: importing it takes longer than most tests

    return None if torch.cuda.is_available() else "no CUDA device"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked exhaustive, as `make test-all` does")
    parser.addoption(
        "--record-seconds", action="store_true", help="write the seconds of each file into tests/seconds.json"
    )
    parser.addoption("--quick", action="store_true", help="leave out tests that take long, as `make check` does")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests of each file in random order")


def pytest_configure(config: pytest.Config) -> None:
    warm_python.start_fork_servers_warm()
    config.pluginmanager.register(RaySelection(config))
    if not hasattr(config, "workerinput"):
        recording = bool(config.getoption("--record-seconds"))
        config.pluginmanager.register(scheduling.LongTests(strict=recording))
        if recording:
            config.pluginmanager.register(scheduling.SecondsRecorder())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make test-all` runs, and skip what cannot run here, each with a reason that -ra prints.

    Tests with Ray come last: Ray leaves threads, children and unclosed files in its process, which others count.
    """
    if addresses := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"names of tests that differ in each process: give ids of their own to {addresses[:3]}")
    everyday.mark_other_cases(items)
    kept = [item for item in items if config.getoption("--all") or not item.get_closest_marker("exhaustive")]
    if config.getoption("--quick"):
        names = [item.nodeid for item in kept]
        quick = scheduling.select_quick(names, scheduling.read_seconds(), scheduling.list_changes())
        kept = [item for item in kept if item.nodeid in quick]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept
    if (seed := config.getoption("--shuffle")) is not None:
        isolation.shuffle(items, seed)
    items.sort(key=lambda item: item.get_closest_marker("ray") is not None)
    for item in items:
        if item.get_closest_marker("ray") is not None:
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
    for mark in ("ray", "vllm", "gpu"):
        marked = [item for item in items if item.get_closest_marker(mark)]
        if marked and (reason := missing_requirement(mark)):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return scheduling.make_scheduler(config, log)


def pytest_collection_finish() -> None:
    """What was imported stays: without it, the many collections that tests ask for look only at what tests made."""
    gc.freeze()
