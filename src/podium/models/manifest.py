"""The manifest of a directory: the size and the SHA-256 checksum of each file in it and in its own directories.

A reader that checks the manifest first never takes a flipped bit, a half-written file or a file of somebody else's for
what was written.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Final

from podium.errors import CheckpointError
from podium.exceptions import read_text

MANIFEST: Final = "manifest.json"
_FORMAT: Final = 2
_READ: Final = (1, 2)  # in 1, the weights of a model had the form in which they are resumed
_REMEDIES: Final = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room, or ask for a larger quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}


def is_refusal(error: OSError) -> bool:
    """Return whether a disk refuses to write since it is full, or since a limit is reached."""
    return error.errno in _REMEDIES


def explain(error: OSError) -> str:
    """Return why a disk refuses, and the remedy if it is known."""
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{error.strerror or error}{f'; {remedy}' if remedy else ''}"


def refusal_of(error: BaseException) -> str:
    """Return why a disk refuses, if that is what ``error`` is about, and the remedy; "" for other errors. Libraries
    raise errors of their own kinds, whose text has the system's words."""
    codes = [
        code for code in _REMEDIES if getattr(error, "errno", None) == code or os.strerror(code) in read_text(error)
    ]
    return explain(OSError(codes[0], os.strerror(codes[0]))) if codes else ""


def file_sums(files: Iterable[Path]) -> dict[str, Any]:
    """Return the size and checksum of each file, by its name."""
    return {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files}


def write_manifest(folder: Path, parts: Iterable[Mapping[str, Any]]) -> None:
    """Write the manifest of ``folder``, whose files have the :func:`file_sums` in ``parts``, one part a writer.

    Raises:
        CheckpointError: A file is not here, since its writer has another disk.
    """
    sums = {name: entry for part in parts for name, entry in part.items()}
    if elsewhere := [name for name in sorted(sums) if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{folder} lacks {', '.join(elsewhere[:3])}, written on another machine: a run's directory must be on a "
            "file system that all nodes share; set run.dir to one"
        )
    content = {"format": _FORMAT, "files": dict(sorted(sums.items()))}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def check_manifest(folder: Path, *, part: int = 0, parts: int = 1, others: Iterable[str] = ()) -> None:
    """Compare the files in ``folder`` with its manifest: the names and sizes of all, the content of every ``parts``-th.

    Args:
        folder: The directory.
        part: The number of the caller among ``parts`` processes, which share the work.
        parts: How many processes check this folder at the same time.
        others: Names in ``folder`` that the manifest does not cover.

    Raises:
        CheckpointError: There is no manifest, or a file is missing, additional or not as it was written.
    """
    if (folder / MANIFEST).exists() and not (folder / MANIFEST).is_file():  # to read a pipe or a device may never end
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: it is no regular file")
    try:
        content: Any = json.loads((folder / MANIFEST).read_bytes())
        sums: dict[str, Any] = {
            str(name): (entry["bytes"], entry["sha256"]) for name, entry in content["files"].items()
        }
        present = {*_names(folder, {MANIFEST, *others})}
    except FileNotFoundError:
        raise CheckpointError(
            f"no finished checkpoint at {folder}: it has no {MANIFEST}, which every checkpoint of this version has"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {type(error).__name__}: {error}") from error
    if content.get("format") not in _READ:
        raise CheckpointError(
            f"{folder / MANIFEST} has format {content.get('format')!r}, and this version of Podium reads formats up to "
            f"{_FORMAT}"
        )
    if present != sums.keys():
        lost, extra = sorted(sums.keys() - present), sorted(present - sums.keys())
        raise CheckpointError(
            f"{folder} is damaged: it lacks {lost[:3]} and has {extra[:3]}, which its manifest does not name; resume "
            "from another checkpoint"
        )
    for number, (name, (size, digest)) in enumerate(sorted(sums.items())):
        file = folder / name
        if not file.is_file() or file.stat().st_size != size or (number % parts == part and _sha256(file) != digest):
            raise CheckpointError(
                f"{file} is damaged: its content is not what was written; resume from another checkpoint"
            )


def _names(folder: Path, others: Set[str]) -> Iterator[str]:
    """The names of the files in ``folder``, and those of the directories in it, as ``directory/file``."""
    for entry in folder.iterdir():
        if entry.name in others:
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from (f"{entry.name}/{within.name}" for within in entry.iterdir())
        else:
            yield entry.name


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
