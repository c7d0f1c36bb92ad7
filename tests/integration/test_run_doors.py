"""A run that somebody sent: whatever is planted in its directory, no command reads, writes or deletes a file elsewhere.

The entries are those of finished runs, and those that a resume adds to them, so a new file of a run is a new case. Each
is replaced by a link to a file or folder of the victim, by a hard link, or by a pipe, and every command that reads runs
is called. The victim's files must stay as they are, and their text must not come out.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from podium.cli import main
from tests.integration.finished_runs import copy_folder

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"
LINE = f"{SECRET}\nb3BlbnNzaC1rZXktdjE\n"


def clear(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)


def links(entry: Path, victim: Path) -> None:
    """A link to what was here, which is now the victim's."""
    os.replace(entry, victim / entry.name) if entry.exists() else (victim / entry.name).write_text(LINE)
    entry.symlink_to(victim / entry.name)


def links_to_secret(entry: Path, victim: Path) -> None:
    (victim / "id_rsa").write_text(LINE)
    clear(entry)
    entry.symlink_to(victim / "id_rsa")


def links_to_nothing(entry: Path, victim: Path) -> None:
    clear(entry)
    entry.symlink_to(victim / "new")


def hard_links(entry: Path, victim: Path) -> None:
    if entry.is_dir():
        return links(entry, victim)
    os.replace(entry, victim / entry.name) if entry.exists() else (victim / entry.name).write_text(LINE)
    os.link(victim / entry.name, entry)


def is_pipe(entry: Path, victim: Path) -> None:
    """A pipe without a writer, on which who reads waits for ever."""
    clear(entry)
    os.mkfifo(entry)


TRICKS: tuple[Callable[[Path, Path], None], ...] = (links, links_to_secret, links_to_nothing, hard_links, is_pipe)
STEP = re.compile(r"\d{6}")


def call_all(run: Path, out: Path) -> Iterator[tuple[str, int | str]]:
    """Call every command that reads the run, the last one removes it. Yields the command and its status."""
    name = str(run)
    for argv in (
        ["runs", name], ["runs", str(run.parent)], ["runs", "compare", name, name, "--out", str(out / "c.png")],
        ["changes", name], ["view", name, "--export", str(out / "view.html")],
        ["export", name, "--to", str(out / "final")], ["export", f"{name}@latest", "--to", str(out / "latest")],
        ["sample", name, "--prompt", "1=", "--backend", "inline"], ["eval", f"{name}@best", "--backend", "inline"],
        ["train", "grpo", "--resume", name, "--run.steps", "4", "--backend", "inline"],
        ["runs", "clean", "--yes", name],
    ):  # fmt: skip
        yield " ".join(argv[:2]), main(argv)


def list_entries(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*"))


def record_entries(finished: Path, scratch: Path) -> list[str]:
    """The entries of a finished run, those that a resume adds, and those that it makes and removes again."""
    run = copy_folder(finished, scratch / "recorded") / "runs" / "run"
    names, made = {*list_entries(run)}, set[str]()
    listening = True

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        for argument in arguments if listening and event.partition(".")[0] in ("open", "os", "shutil") else ():
            path = os.fsdecode(argument) if isinstance(argument, str | bytes) else ""
            made.update([path.removeprefix(f"{run}/")] if path.startswith(f"{run}/") else ())

    sys.addaudithook(hear)
    assert main(["train", "grpo", "--resume", str(run), "--run.steps", "4", "--backend", "inline"]) == 0
    listening = False
    return sorted(names | {*list_entries(run)} | {name for name in made if "/" not in name or ".tmp" in name})


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(path.relative_to(folder)): (
            (status := path.lstat()).st_mtime_ns, status.st_mode, path.read_bytes() if path.is_file() else b""
        )
        for path in (folder, *folder.rglob("*"))
    }  # fmt: skip


def check(trick: Callable[[Path, Path], None], entries: Sequence[str], finished: Path, tmp_path: Path) -> None:
    """Play the trick with one entry after the other, and call all commands each time."""
    harmed: list[str] = []
    for entry in entries:
        case = tmp_path / "case"
        run, victim, out = copy_folder(finished, case) / "runs" / "run", case / "victim", case / "out"
        victim.mkdir()
        out.mkdir()
        (run / entry).parent.mkdir(parents=True, exist_ok=True)
        trick(run / entry, victim)
        before = snapshot(victim)
        for command, _ in call_all(run, out):
            if (after := snapshot(victim)) != before:
                harmed.append(f"{command}: {entry}: {sorted(before.keys() ^ after.keys()) or 'changed'}")
                before = after
            if any(SECRET.encode() in path.read_bytes() for path in out.rglob("*") if path.is_file()):
                harmed.append(f"{command}: {entry}: its text is in what was written")
                shutil.rmtree(out)
                out.mkdir()
        shutil.rmtree(case)
    assert not harmed, "\n".join(harmed)


def test_a_link_in_a_run_leads_nowhere(finished_grpo: Path, tmp_path: Path) -> None:
    """Of the entries of the run's own folder, those that each command opens, and one of each kind that it makes."""
    entries = record_entries(finished_grpo, tmp_path)
    opened = {"config.yaml", "ledger.jsonl", "checkpoints", "model"}
    made = [
        entry for entry in entries if "/" not in entry and entry not in list_entries(finished_grpo / "runs" / "run")
    ]
    check(links, [*sorted(opened & {*entries}), *made[:1]], finished_grpo, tmp_path)


@pytest.mark.parametrize(
    "trick", [pytest.param(links_to_nothing, marks=pytest.mark.exhaustive), is_pipe], ids=lambda trick: trick.__name__
)
def test_other_tricks(trick: Callable[[Path, Path], None], finished_grpo: Path, tmp_path: Path) -> None:
    entries = ("model/config.json", "logs/controller.log")
    check(trick, entries, finished_grpo, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trick", TRICKS, ids=lambda trick: trick.__name__)
def test_nothing_outside_a_run_is_touched(
    trick: Callable[[Path, Path], None], finished_grpo: Path, tmp_path: Path
) -> None:
    entries = record_entries(finished_grpo, tmp_path)
    newest = max(STEP.findall(" ".join(list_entries(finished_grpo / "runs" / "run"))))
    entries = [entry for entry in entries if not (step := STEP.search(entry)) or int(step[0]) >= int(newest)]
    check(trick, entries, finished_grpo, tmp_path)


def test_export_copies_what_a_model_has(finished_grpo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = copy_folder(finished_grpo, tmp_path / "case") / "runs" / "run"
    (run / "model" / "notes.txt").write_text(LINE)
    (run / "model" / ".env").write_text(LINE)
    assert main(["export", str(run), "--to", str(tmp_path / "exported")]) == 0
    assert sorted(path.name for path in (tmp_path / "exported").iterdir()) == [
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert "a model has no such files: .env, notes.txt" in caplog.text
    (run / "model" / "notes.txt").unlink()
    (run / "model" / "notes.txt").symlink_to("/etc/hostname")
    assert main(["export", str(run), "--to", str(tmp_path / "again")]) == 2
    assert not (tmp_path / "again").exists()
