"""Packages whose public names are imported on first use."""

from __future__ import annotations

import gc
import importlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType

import pytest

import podium
from podium.__main__ import main
from podium.backends.interrupts import Interrupts
from podium.lazy import without_collector

SOURCE = Path(podium.__file__).parent
PACKAGES = sorted(
    ".".join(("podium", *path.parent.relative_to(SOURCE).parts))
    for path in SOURCE.rglob("__init__.py")
    if "= lazy_exports(__name__)" in path.read_text()
)


@pytest.mark.parametrize("name", PACKAGES)
def test_every_name_is_there_and_is_no_module_of_the_package(name: str) -> None:
    package = importlib.import_module(name)
    assert package.__all__
    assert set(package.__all__) <= set(dir(package))
    for public in package.__all__:
        assert getattr(package, public) is not None
        assert not (Path(str(package.__file__)).parent / f"{public}.py").exists()
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'no_such_name'"):
        _ = package.no_such_name


def test_importing_the_packages_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "numpy", "pydantic", "yaml", "rich", "datasets", "ray", "podium.runtime")
    script = f"import sys, {', '.join(PACKAGES)}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_the_contract_suite_sends_to_processes_imports_neither_torch_nor_pytest() -> None:
    script = "import sys, podium_testing.shipped; print([name for name in ('torch', 'pytest') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_collector_is_out_for_a_block_and_ignores_what_came_of_it() -> None:
    try:
        before = gc.get_freeze_count()
        with without_collector():
            assert not gc.isenabled()
            kept = [[number] for number in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(kept)
        gc.disable()  # somebody else's wish
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


SWALLOWS = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except BaseException as error:
    {}
"""


class Stopped(Exception):
    """What a handler of the user's raises."""


def stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    """The handler that backends put in the place of Python's own."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield (handler := Interrupts())
    handler.restore()
    signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("then", ["pass", "raise ImportError('no') from error", "raise"])
@pytest.mark.parametrize("backend", [False, True])
def test_ctrl_c_that_an_import_swallows_is_raised_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, backend: bool, interrupts: Interrupts
) -> None:
    (tmp_path / "swallowing.py").write_text(SWALLOWS.format(then))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "swallowing", raising=False)
    if not backend:
        interrupts.restore()
    handler = signal.getsignal(signal.SIGINT)
    assert (handler == signal.default_int_handler) is not backend
    with pytest.raises(KeyboardInterrupt), without_collector():
        importlib.import_module("swallowing")
    assert signal.getsignal(signal.SIGINT) == handler


@pytest.mark.parametrize("then", ["pass", "raise ImportError('no') from error", "raise"])
def test_what_a_handler_of_the_users_raises_in_an_import_is_raised_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    (tmp_path / "swallowing.py").write_text(SWALLOWS.format(then))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "swallowing", raising=False)
    former = signal.signal(signal.SIGINT, stop)
    try:
        with pytest.raises(Stopped), without_collector():
            importlib.import_module("swallowing")
        assert signal.getsignal(signal.SIGINT) == stop
    finally:
        signal.signal(signal.SIGINT, former)


def test_an_error_of_an_import_and_a_handler_of_the_users_are_left_alone() -> None:
    calls: list[int] = []
    with pytest.raises(ModuleNotFoundError), without_collector():
        importlib.import_module("no_such_module")
    former = signal.signal(signal.SIGINT, lambda number, _: calls.append(number))
    try:
        with without_collector():
            signal.raise_signal(signal.SIGINT)
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, former)


def test_ctrl_c_while_the_command_line_is_imported_ends_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "podium.cli", Interrupted("podium.cli"))
    assert main() == 130
    assert capsys.readouterr().err == "podium: interrupted\n"
