"""Nothing but RunFiles touches a run's directory, and RunFiles leads nowhere else."""

from __future__ import annotations

import ast
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.errors import DataError
from podium.runs.run_files import RunFiles

SOURCE = Path(podium.__file__).parent
PLUGINS = Path(__file__).parents[3] / "plugins"
READERS = [PLUGINS / f"podium-{name}" / "src" for name in ("changes", "curves", "inference", "view")]
OS = {"open", "mkfifo", "replace", "rename", "unlink", "remove", "mkdir", "makedirs", "rmdir", "removedirs", "truncate"}
OS |= {"listdir", "scandir", "walk", "symlink", "link", "fwalk", "chmod", "chown", "utime", "readlink"}
METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "unlink", "rmdir", "symlink_to", "touch"}
METHODS |= {"hardlink_to", "iterdir", "glob", "rglob", "rename", "chmod", "readlink", "savefig", "FileHandler"}
METHODS |= {"ParquetWriter", "ParquetFile", "write_table", "read_table", "read_schema", "SummaryWriter", "safe_open"}
METHODS |= {"save_pretrained", "save_file", "load_file", "export_chrome_trace", "to_parquet", "tofile", "fromfile"}


def find_calls(tree: ast.AST) -> Iterator[str]:
    """The calls in a module that touch files by their paths."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id == "open":
            yield "open"
        elif isinstance(function, ast.Attribute):
            owner = function.value.id if isinstance(function.value, ast.Name) else ""
            name = function.attr
            if (owner == "os" and name in OS) or owner in ("shutil", "tempfile"):
                yield f"{owner}.{name}"
            elif (name in METHODS or name in ("open", "replace")) and not is_other(node, function, owner):
                yield name


def is_other(node: ast.Call, function: ast.Attribute, owner: str) -> bool:
    """Whether a call of open() is one of RunFiles or of a class of ours, or one of replace() is that of a text."""
    receiver = ast.unparse(function.value)
    if function.attr == "replace" and (len(node.args) != 1 or node.keywords or owner == "folder"):
        return True  # Path.replace has one argument, and that of RunFiles yields a file
    return (
        "files" in receiver.lower() or "gateway" in receiver or owner in ("os", "self", "Image", "policy", "webbrowser")
    )


OPENED = "RunFiles has opened the file that this is given"
LOOKED_AT = "in a folder that RunFiles has made, or looked at just before: see the head of run_files.py"
LOGS = "in logs/, which a resume has looked at; open_log follows no link"
PERSON = "what the person names: data, models, configurations, and where results go"
PRIVATE = "a directory of the process alone, or of this machine"
PACKAGES = ("cli", "models", "processes", "rewards", "runs", "runtime", "telemetry", "trainer", "workers")
"""Those that know runs, or get paths of their files. Backends get that of logs/, for :func:`.open_log`."""
ELSEWHERE: dict[str, tuple[str, str]] = {
    "cli/__init__.py": ("os.open", PRIVATE),
    "cli/presets/__init__.py": ("glob read_text", "files of the package"),
    "models/adapters.py": ("read_bytes", LOOKED_AT),
    "models/loading.py": ("chmod glob read_text save_pretrained", LOOKED_AT),
    "models/manifest.py": ("iterdir open read_bytes write_text", LOOKED_AT),
    "models/model_files.py": (
        "mkdir read_bytes rglob save_pretrained tempfile.TemporaryDirectory write_bytes",
        LOOKED_AT,
    ),
    "models/other_parts_search.py": ("read_bytes", PERSON),
    "models/safetensors_writer.py": ("open", LOOKED_AT),
    "models/tensor_files.py": ("open", LOOKED_AT),
    "models/other_parts.py": ("read_bytes rename write_bytes write_text", LOOKED_AT),
    "models/weight_files.py": ("open read_text", LOOKED_AT),
    "processes/secret_handover.py": ("os.open", PRIVATE),
    "processes/launcher.py": (
        "mkdir open os.open tempfile.TemporaryDirectory tempfile.gettempdir tempfile.mkdtemp",
        LOGS,
    ),
    "processes/limits.py": ("read_text", PRIVATE),
    "processes/supervisor.py": ("os.open", PRIVATE),
    "processes/table.py": ("glob iterdir read_bytes read_text", PRIVATE),
    "rewards/dispatcher_client.py": ("os.open", LOGS),
    "rewards/reached_texts.py": ("read_bytes", "the files of the code of a reward"),
    "runs/measures.py": ("read_text", "the tokenizer of a model that settings name"),
    "runs/run_writer.py": ("rmdir", "the parents that were made for a run's directory"),
    "runs/named_code.py": ("glob mkdir open read_bytes", "the records of this user, and the files of functions"),
    "runs/named_files.py": ("glob open os.walk", PERSON),
    "runtime/calls/stacks.py": ("shutil.which", PRIVATE),
    "runtime/profiling.py": ("export_chrome_trace mkdir", LOOKED_AT),
    "telemetry/sinks/console.py": ("os.open", PRIVATE),
    "telemetry/sinks/jsonl.py": ("mkdir open", PERSON),
    "telemetry/sinks/trace.py": ("mkdir open", PERSON),
    "podium_changes/evaluations.py": ("ParquetFile", OPENED),
    "podium_curves/comparison.py": ("savefig", PERSON),
    "podium_curves/drawing.py": ("savefig", OPENED),
    "podium_inference/command.py": ("open", PERSON),
    "podium_inference/export.py": ("iterdir mkdir open rglob shutil.copyfileobj write_text", PERSON),
    "podium_inference/export_command.py": ("tempfile.TemporaryDirectory", PRIVATE),
    "podium_inference/stored_policy.py": ("save_pretrained", PERSON),
    "podium_inference/suites.py": ("write_text", PERSON),
    "podium_view/command.py": ("iterdir", PERSON),
    "podium_view/completions.py": ("ParquetFile", OPENED),
    "podium_view/owner.py": ("read_text", "the kernel's table of connections"),
    "podium_view/runs.py": ("glob iterdir", "the directory of runs, whose owner the person is"),
    "podium_view/page.py": ("read_text", PRIVATE),
    "trainer/completion_files.py": ("ParquetWriter write_table", OPENED),
    "trainer/data_objects.py": (
        "ParquetWriter mkdir open replace unlink write_table",
        "beside the runs",
    ),
    "trainer/replay.py": ("ParquetFile", OPENED),
    "workers/learner.py": ("mkdir", LOOKED_AT),
}


def test_nothing_else_touches_a_run() -> None:
    """Every call that takes a path is known, with the reason why it touches no run, or does so after RunFiles."""
    calls: dict[str, str] = {}
    files = [(file, SOURCE) for package in PACKAGES for file in (SOURCE / package).rglob("*.py")]
    files += [(file, folder) for folder in READERS for file in folder.rglob("*.py")]
    for file, root in files:
        name = str(file.relative_to(root))
        names = " ".join(sorted({*find_calls(ast.parse(file.read_text()))}))
        if names and name != "runs/run_files.py" and not name.startswith("workers/weight_sync/"):
            calls[name] = names
    assert calls == {name: names for name, (names, _) in ELSEWHERE.items()}, (
        "open files of a run by podium.runs.run_files; anything else belongs into this table, with its reason"
    )


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    (tmp_path / "elsewhere" / "inner").mkdir(parents=True)
    (tmp_path / "elsewhere" / "file").write_text("mine")
    (tmp_path / "elsewhere" / "inner" / "file").write_text("mine")
    run = tmp_path / "run"
    (run / "folder").mkdir(parents=True)
    (run / "folder" / "file").write_text("its")
    (run / "link").symlink_to(tmp_path / "elsewhere" / "file")
    (run / "way").symlink_to(tmp_path / "elsewhere")
    os.link(tmp_path / "elsewhere" / "file", run / "twice")
    os.mkfifo(run / "pipe")
    return RunFiles(run)


def call(method: Callable[[str], Any], name: str) -> bool:
    """Call a method, and close the file that it returns. Returns whether the name was taken."""
    try:
        answer = method(name)
    except (DataError, OSError):
        return False
    if hasattr(answer, "close"):
        answer.close()
    return True


def touch_all(files: RunFiles, name: str) -> Iterator[str]:
    """Call every method of RunFiles that takes a name, and say which one did not refuse."""

    def replace(name: str) -> None:
        with files.replace(name) as file:
            file.write(b"new")

    for method in (
        files.open, files.read, files.read_small, files.append, files.create, replace, files.names, files.check,
        files.make_folder, files.sync, files.sync_all, files.renew_folder, lambda name: files.write("new", name),
        lambda name: files.rename("folder/file", name), lambda name: files.link("folder", name), files.remove,
        lambda name: [*files.walk(name)], lambda name: files.rename(name, "folder/other"),
    ):  # fmt: skip
        if call(method, name):
            yield getattr(method, "__name__", "")


@pytest.mark.parametrize("name", ["link", "way", "way/file", "way/inner", "way/inner/file", "twice", "pipe"])
def test_no_method_leads_elsewhere(files: RunFiles, tmp_path: Path, name: str) -> None:
    before = {path: path.lstat() for path in (tmp_path / "elsewhere").rglob("*")}
    assert [*touch_all(files, name)] or name.startswith("way/"), "what lies in the run itself may be replaced"
    after = {path: path.lstat() for path in (tmp_path / "elsewhere").rglob("*")}
    for path, status in before.items():
        assert (after[path].st_mtime_ns, after[path].st_size) == (status.st_mtime_ns, status.st_size), path
    assert after.keys() == before.keys()
    assert (tmp_path / "elsewhere" / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["../elsewhere/file", "folder/../../elsewhere/file", "/etc/passwd", "folder/\0"])
def test_no_name_leads_out(files: RunFiles, name: str) -> None:
    for method in (files.open, files.append, files.names, files.remove, files.make_folder):
        assert not call(method, name) or name.startswith("/"), "a name begins in the run"
    assert Path("/etc/passwd").is_file()


def test_the_way_to_a_run_is_its_owners_choice(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    files = RunFiles(tmp_path / "runs" / "one")
    files.make_folder("logs")
    files.write("text", "logs", "a.log")
    with files.append("logs/a.log") as file:
        file.write(b" and more")
    assert (tmp_path / "disk" / "one" / "logs" / "a.log").read_text() == "text and more"
    assert RunFiles(tmp_path / "disk" / "one").read("logs", "a.log") == b"text and more"


def test_a_folder_that_becomes_a_link_meanwhile_is_not_followed(files: RunFiles, tmp_path: Path) -> None:
    """Somebody who may write to the run exchanges a folder for a link as often as possible."""
    stop, folder, aside = threading.Event(), files.path / "folder", files.path / "aside"

    def exchange() -> None:
        while not stop.is_set():
            folder.rename(aside)
            folder.symlink_to(tmp_path / "elsewhere")
            folder.unlink()
            aside.rename(folder)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        for number in range(2000):
            try:
                files.write(f"{number}", "folder", "file")
                files.append("folder", "file").close()
                files.remove("folder", "file")
            except (DataError, OSError):
                continue
    finally:
        stop.set()
        thread.join()
    assert (tmp_path / "elsewhere" / "file").read_text() == "mine"
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["file", "inner"]


def test_a_second_name_is_refused_where_libraries_write_by_paths(files: RunFiles) -> None:
    os.link(files.path / "twice", files.path / "folder" / "update.json")
    assert files.check("folder") == files.absolute / "folder"
    with pytest.raises(DataError, match=r"folder/update\.json is a link, or has another name \(hard link\)"):
        files.check("folder", is_written=True)


def test_a_large_file_of_holes_is_not_read(files: RunFiles) -> None:
    """Its gigabytes would fill the memory, and an archive that brings it has a few bytes."""
    with (files.path / "folder" / "file").open("ab") as file:
        file.truncate(1 << 40)
    for method in (files.open, files.read, files.read_small, files.append):
        with pytest.raises(DataError, match="folder/file is a link, or has 1,099,511,627,776 bytes, of which nearly"):
            method("folder", "file")
    with pytest.raises(DataError, match="holes"):
        files.check("folder")
    os.truncate(files.path / "folder" / "file", 1 << 20)
    assert len(files.read("folder", "file")) == 1 << 20


def test_another_user_prepares_a_run(tmp_path: Path) -> None:
    """The links are those of a second user, who may not write to the victim's files."""
    if os.getuid() != 0:
        pytest.skip("only root can be two users")
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[: len(tmp_path.relative_to(tempfile.gettempdir()).parts) - 1]:
        parent.chmod(0o755)
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    victim.chmod(0o600)
    run.mkdir()
    os.chown(run, 65534, 65534)
    if not (child := os.fork()):
        try:
            os.setgid(65534)
            os.setuid(65534)
            with pytest.raises(PermissionError):
                victim.read_text()
            for name in ("ledger.jsonl", "metrics.jsonl", ".lock", "curve.png"):
                (run / name).symlink_to(victim)
            os._exit(0)
        finally:  # whatever was raised: this process is no second run of the tests
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    files = RunFiles(run)
    for method in (files.append, files.open, lambda name: files.write("x", name), lambda name: files.lock()):
        for name in files.names():
            assert not call(method, name) or stat.S_ISREG(files.kind(name)), "the link itself was replaced"
    assert victim.read_text() == "mine"
