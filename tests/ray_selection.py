"""Which tests with Ray run every day: all of them after a change of what they prove, and two otherwise.

A test with the mark ``ray`` starts a cluster, and most of them prove nothing but the backend ``ray`` and the runtime
above it. ``make test-ray`` runs all of them and, if they pass, writes digests of that code, of the tests and of Ray's
version into tests/ray_proof.json. While the digests still match, pytest leaves these tests out, except SMOKE_TESTS.
Where only files of tests have changed, it runs the tests with Ray of these files.
That holds for the contract suite on the backend ``ray``, too. After a change, tests/contract/everyday.py decides which
tests of the suite run. ``--all`` runs every test, and so does naming a test's file on the command line.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest

__all__ = ["PROOF", "SMOKE_TESTS", "RaySelection", "compute_digests", "find_changes", "main"]

ROOT: Final = Path(__file__).parents[1]
PROOF: Final = ROOT / "tests" / "ray_proof.json"
SMOKE_TESTS: Final = (
    "tests/integration/test_train_backends.py::test_one_rank_gives_the_same_bits_as_inline[ray]",
    "tests/contract/test_backends.py::TestBackends::test_a_death_is_named_now_and_later_until_restart[ray]",
)
"""A training on a cluster of two nodes, and a process that is killed."""
FOLDERS: Final = ("plugins/podium-ray", "src/podium/runtime", "src/podium/data", "plugins/podium-testing/src")


def compute_digests(root: Path = ROOT) -> dict[str, str]:
    """Return what the tests with Ray prove and what they are made of: a digest of each part, by the part's name."""
    paths = [path for kind in ("unit", "contract", "integration") for path in (root / "tests" / kind).rglob("*.py")]
    helpers = [path for path in paths if path.name.startswith("ray_")]
    files = [path for path in paths if path not in helpers and "mark.ray" in path.read_text(encoding="utf-8")]
    return {
        **{folder: _digest(root, (root / folder).rglob("*.py")) for folder in FOLDERS},
        "src/podium/backends/*.py": _digest(root, (root / "src/podium/backends").glob("*.py")),
        "what tests with Ray share": _digest(root, [*helpers, root / "docs/ray.md"]),
        **{path.relative_to(root).as_posix(): _digest(root, [path]) for path in files},
        "version of Ray": importlib.metadata.version("ray") if importlib.util.find_spec("ray") else "none",
    }


def find_changes() -> list[str]:
    """Return the parts that have changed since all tests with Ray passed; all parts where there is no proof."""
    proof = json.loads(PROOF.read_text(encoding="utf-8")) if PROOF.exists() else {}
    return [part for part, digest in compute_digests().items() if proof.get(part) != digest]


class RaySelection:
    """The plugin of pytest that leaves tests with Ray out, and says in the summary how many and why.

    Under pytest-xdist each process selects for itself, and the first one that ends tells the controller.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.left_out = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        changes = [] if config.getoption("--all") else find_changes()
        files = tuple(change + "::" for change in changes if Path(change).name.startswith("test_"))
        if config.getoption("--all") or len(files) < len(changes):
            return
        proven = [item for item in items if self._is_left_out(item) and not item.nodeid.startswith(files)]
        if not proven:
            return
        for test in SMOKE_TESTS:
            file = test.partition("::")[0]
            if any(item.nodeid.startswith(file) for item in proven) and all(item.nodeid != test for item in items):
                raise pytest.UsageError(f"SMOKE_TESTS of tests/ray_selection.py: there is no test {test}")
        config.hook.pytest_deselected(items=proven)
        left_out = set(proven)
        items[:] = [item for item in items if item not in left_out]
        self.left_out = len(proven)

    def pytest_sessionfinish(self) -> None:
        output: dict[str, Any] = getattr(self.config, "workeroutput", {})  # what a process of pytest-xdist sends
        output["tests with Ray left out"] = self.left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.left_out = getattr(node, "workeroutput", {}).get("tests with Ray left out", self.left_out)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left_out:
            terminalreporter.write_line(
                f"{self.left_out} tests with Ray were left out: {', '.join(FOLDERS)}, and these tests are as they "
                f"were when all passed ({PROOF.relative_to(ROOT)}). --all or `make test-ray` runs them."
            )

    def _is_left_out(self, item: pytest.Item) -> bool:
        named = any(argument.partition("::")[0].endswith(item.path.name) for argument in self.config.args)
        with_ray = item.get_closest_marker("ray") is not None
        return with_ray and not named and item.nodeid not in SMOKE_TESTS


def main() -> None:
    """Run all tests with Ray. Write the proof if they pass and nothing has changed meanwhile."""
    argparse.ArgumentParser(prog="python -m tests.ray_selection", description=main.__doc__).parse_args()
    if importlib.util.find_spec("ray") is None:
        sys.exit("Ray is not installed: make env")
    digests = compute_digests()
    command = [sys.executable, "-m", "pytest", "-m", "ray", "--all"]  # one after the other: several clusters are slow
    if status := subprocess.run(command, cwd=ROOT, check=False).returncode:
        sys.exit(status)
    if compute_digests() != digests:
        sys.exit("The code has changed while the tests ran, so they prove nothing. Run them again.")
    PROOF.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def _digest(root: Path, paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
