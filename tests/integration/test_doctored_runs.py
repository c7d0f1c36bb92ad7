"""A run whose files were damaged or doctored: every command refuses it in words, or leaves out what it names.

Each value of each file of a finished run is replaced, one at a time: a new file or a new field of a run is a new case.
The checksums of a checkpoint are made anew, as somebody would who wants the value to be read. A command may answer in
three ways: as for the untouched run, since it does not read the value; with an error that names the file; or with a
warning that names it.
"""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from podium.cli import main
from podium.config import find_mistyped, read_values
from podium.errors import ConfigError
from podium.models.manifest import MANIFEST, file_sums, write_manifest
from podium.trainer import GRPOConfig
from tests.integration.finished_runs import copy_folder

MISSING = object()
DEEP: Any = None
for _ in range(300):
    DEEP = [DEEP]
VALUES: dict[str, Any] = {
    "text": "x", "huge": 10**400, "surrogate": "\ud800", "list": [], "null": None, "negative": -5, "nan": float("nan"),
    "missing": MISSING, "deep": DEEP, "truth": True,
}  # fmt: skip
CUTS: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[: len(data) * 2 // 3],
    "not UTF-8": lambda data: data[: len(data) // 2] + b"\xff\xfe" + data[len(data) // 2 :],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "long line": lambda data: data[:-2] + b" " * 100_000_000 + data[-2:],
}
SHOWN = re.compile(r"\d+\.\d+s|\d+ms|\d\d:\d\d|[\d.]+ MiB|\S+/case\S*")


class Case(NamedTuple):
    """A file, the names that lead to a value of it, and what is in its place."""

    file: str
    path: tuple[str | int, ...]
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{'.'.join(map(str, self.path))} {self.what}"


def read(file: Path) -> Any:
    """The content as nested values: of a file of lines their list, of a Parquet file its columns."""
    match file.suffix:
        case ".json":
            text = file.read_text().rstrip()
            return json.loads(text)
        case ".jsonl":
            return [json.loads(line) for line in file.read_text().splitlines()]
        case ".yaml":
            return yaml.safe_load(file.read_text())
        case ".parquet":
            return pq.read_table(file).to_pydict()
        case _:
            return None


def write(file: Path, content: Any) -> None:
    match file.suffix:
        case ".jsonl":
            file.write_text("".join(json.dumps(line) + "\n" for line in content))
        case ".json" if file.name.startswith("trace"):
            file.write_text("[\n" + ",\n".join(json.dumps(line, separators=(",", ":")) for line in content) + "\n]\n")
        case ".yaml":
            file.write_text(yaml.safe_dump(content, allow_unicode=False))
        case ".parquet":
            columns = {name: pa.array(column) for name, column in content.items()}
            pq.write_table(pa.table(columns), file)
        case _:
            file.write_text(json.dumps(content))


def paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The ways to all values: of a list the first, the second and the last, since a reader may treat them apart."""
    if path:
        yield path
    if isinstance(value, dict):
        for name in value:
            yield from paths(value[name], (*path, name))
    elif isinstance(value, list):
        for place in sorted({0, 1, len(value) - 1} & {*range(len(value))}):
            yield from paths(value[place], (*path, place))


def list_cases(run: Path) -> list[Case]:
    cases: list[Case] = []
    for file in sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink()):
        name = str(file.relative_to(run))
        if "step-000001" in name or "step-000002/" in name or file.name == ".lock":
            continue
        content = read(file)
        if file.suffix == ".parquet":
            cases += [Case(name, (column,), what) for column in content for what in ("text", "list", "null", "missing")]
        elif content is not None:
            cases += [Case(name, path, what) for path in paths(content) for what in VALUES]
        cases += [Case(name, (), what) for what in CUTS]
    return cases


def replaced(content: Any, path: tuple[str | int, ...], value: Any) -> Any:
    content = inner = copy.deepcopy(content)
    for name in path[:-1]:
        inner = inner[name]
    if value is MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return content


def is_legitimate(case: Case) -> bool:
    """Whether an untouched run of other settings, data or rewards may have such a file too, so that no reader can tell
    that it was changed."""
    file, path = Path(case.file), case.path
    if re.search(r"(model|policy)/(tokenizer|config|generation)", case.file):
        return True  # transformers alone knows what may be in these
    match case.what:
        case "null" | "missing" if file.suffix == ".yaml":
            return True  # the key has its default
        case "null" | "missing" if file.name == "summary.json" and path == ("model_path",):
            return True  # a run that was stopped has no final model
        case "null" | "missing" if file.suffix == ".jsonl" and len(path) == 1:
            return True  # the line was not written yet
        case "missing" if file.name == "metrics.jsonl":
            return True  # the step or the evaluation did not measure it: without a loss nothing is clipped
        case "null" if path[1:2] == ("scores",):
            return True  # the reward left this item out, and the figure is the mean of the others
        case _:
            return False


def doctor(run: Path, case: Case) -> bool:
    """Change the run. Returns whether something is now of another type than before, which nobody may take."""
    file = run / case.file
    if not case.path:
        file.write_bytes(CUTS[case.what](file.read_bytes()))
        was, value = "", None
    else:
        content = read(file)
        was = content
        for name in case.path:
            was = was[name]
        value = VALUES[case.what]
        if file.suffix == ".parquet" and value is not MISSING:
            value = [value] * len(was)
        write(file, replaced(content, case.path, value))
    for folder in (file.parent, *file.parent.parents)[:3]:
        if (folder / MANIFEST).is_file() and file.name != MANIFEST:
            names = json.loads((folder / MANIFEST).read_text())["files"]
            sums = {name: file_sums([folder / name])[(folder / name).name] for name in names}
            write_manifest(folder, [sums])
    if is_legitimate(case) or value == was:
        return False
    if case.file == "config.yaml" and case.path:  # a key that is unset may take a number, or a name also a list
        try:
            return bool(find_mistyped(GRPOConfig, read_values(object, file)))
        except ConfigError:  # it is refused as a whole
            return True
    kinds = {type(was), type(value)}
    return len(kinds) > 1 and kinds != {int, float}


def commands(run: Path, out: Path, file: str) -> Iterator[list[str]]:
    name = str(run)
    yield ["runs", name]
    yield ["runs", "compare", name, name, "--out", str(out / "c.png")]
    yield ["changes", name]
    yield ["view", name, "--export", str(out / "view.html")]
    yield ["export", f"{name}@latest", "--to", str(out / "latest")]
    if file.startswith("model/") or file.endswith(("config.json", "config.yaml")):
        yield ["export", name, "--to", str(out / "final")]
        yield ["sample", name, "--prompt", "1=", "--backend", "inline", "--engine.name", "transformers"]
    yield ["train", "grpo", "--resume", name, "--run.steps", "4", "--backend", "inline"]


def result(run: Path, argv: list[str], text: str) -> Any:
    """What a command came to, without times and places."""
    if argv[0] == "train":
        rows = read(run / "metrics.jsonl")
        return [(row["kind"], row["step"], row.get("loss"), row.get("reward_mean"), row.get("kl_coef")) for row in rows]
    if argv[0] == "export":
        return sorted(path.name for path in Path(argv[3]).rglob("*")), (Path(argv[3]) / "README.md").read_text()
    return SHOWN.sub("", text)


def call(
    run: Path, out: Path, file: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Iterator[tuple[str, int, Any, str]]:
    for argv in commands(run, out, file):
        capfd.readouterr()
        status = main(argv)
        text = capfd.readouterr()
        answer = result(run, argv, text.out) if status == 0 else None
        yield " ".join(argv[:2]), status, answer, text.err + caplog.text  # what a terminal shows
        caplog.clear()


def check(
    cases: list[Case],
    finished: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults: list[str] = []
    expected: dict[str, dict[str, Any]] = {}
    for case in cases:
        folder = tmp_path / "case"
        group = "model" if case.file.startswith("model/") or "config" in case.file else ""
        for changed in (False, True) if group not in expected else (True,):
            shutil.rmtree(folder, ignore_errors=True)
            run, out = copy_folder(finished, folder) / "runs" / "run", folder / "out"
            out.mkdir()
            strict = changed and doctor(run, case)
            answers = call(run, out, case.file, capfd, caplog)
            while True:
                try:
                    name, status, answer, err = next(answers)
                except StopIteration:
                    break
                except Exception as error:  # noqa: BLE001 - each is a fault, and the others count too
                    faults.append(f"{case}: {type(error).__name__}: {error!s:.200}")
                    break
                if not changed:
                    assert status == 0, f"{name}: {err}"
                    expected.setdefault(group, {})[name] = answer
                elif "Traceback" in err:
                    faults.append(f"{case}: {name}: {err[-300:]}")
                elif status != 0 and not err.strip():
                    faults.append(f"{case}: {name} ended with {status} and without a word")
                elif status == 0 and strict and answer != expected[group][name] and case.file.split("/")[-1] not in err:
                    faults.append(f"{case}: {name} took it without a word: {err[-200:]}")
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults)


def test_some_doctored_runs(
    finished_grpo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    cases = list_cases(finished_grpo / "runs" / "run")
    sections = [Case("config.yaml", ("engine",), "text"), Case("config.yaml", ("batch",), "huge")]
    size = next(
        case for case in cases if case.file.endswith("resume/model.json") and case.what == "huge" and case.path[2:]
    )
    check([*sections, size, random.Random(0).choice(cases)], finished_grpo, tmp_path, capfd, caplog)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
def test_doctored_runs(
    part: int,
    finished_grpo: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cases = list_cases(finished_grpo / "runs" / "run")
    check(cases[part::80], finished_grpo, tmp_path, capfd, caplog)
