"""Commands that install missing packages from a clone, because Podium is on no package index."""

import json
import re
import shlex
import tomllib
from contextlib import suppress
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, requires
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def install_command(extra: str, only: str = "", *, package: str = "podium") -> str:
    """Return the ``pip install`` command for the packages of an extra.

    The command names these packages themselves, and never Podium: on an index, the name may belong to somebody else.

    Args:
        extra: Name of the extra.
        only: The command installs this package alone, with the extra's version of it. "" means the whole extra.
        package: Package that has the extra.
    """
    try:
        lines = requires(package) or []
    except PackageNotFoundError:  # a checkout on the path of Python that was not installed
        lines = []
    parts = [line.partition(";") for line in lines]
    names = [name.strip() for name, _, marker in parts if marker.replace('"', "'").strip() == f"extra == '{extra}'"]
    names = [name for name in names if not only or name.startswith(only)]
    return shlex.join(["pip", "install", *(names or [only or extra])])


def repair_command(entry: EntryPoint, error: BaseException) -> str:
    """Return the ``pip install`` command for the library whose absence raised ``error`` while ``entry`` was loaded, or
    "" if something else is wrong."""
    missing = (error.name or "") if isinstance(error, ImportError) else ""
    return library_command(entry, missing.partition(".")[0])


def library_command(entry: EntryPoint, library: str) -> str:
    """Return the ``pip install`` command for a library that the package of ``entry`` requires, or "" if it does not."""
    for line in (entry.dist.requires if entry.dist else None) or []:
        requirement, _, marker = line.partition(";")
        name = re.match(r"[\w.-]+", requirement)
        if name and name.group().replace("-", "_") == library.replace("-", "_") and "extra ==" not in marker:
            return shlex.join(["pip", "install", requirement.strip()])
    return ""


def explain_packages(group: str, name: str = "") -> str:
    """Return the end of an error on a name that no installed package has: which packages bring others, and how those of
    Podium's are installed. Where Podium was installed from a clone, this is the command for the package that has it.

    Args:
        group: Group of entry points.
        name: Entry point of the group. "" means that no single one is missing.
    """
    text = (
        f"packages add others through the entry point group {group}, and Podium's packages, podium-NAME, are installed "
        "in its clone by: pip install ./plugins/podium-NAME"
    )
    projects, directory = _read_packages(), find_package(group, name)
    if directory is None:
        return text
    # Packages of the clone that it needs come from the clone, too: on an index, their names may be somebody else's.
    needed = projects[directory].get("dependencies", [])
    paths = [str(path) for path in projects if path == directory or path.name in needed]
    return f"{text}; the missing one by: {shlex.join(['pip', 'install', *paths])}"


def find_package(group: str, name: str) -> Path | None:
    """Return the directory in the clone of the package that has an entry point; None where there is none."""
    entries = {path: project.get("entry-points", {}).get(group, {}) for path, project in _read_packages().items()}
    return next((path for path, names in entries.items() if name in names), None)


def _read_packages() -> dict[Path, dict[str, Any]]:
    """Return the table ``project`` of each of Podium's packages by its directory in the clone that Podium was installed
    from. There are none without a clone."""
    try:
        origin = json.loads(distribution("podium").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # a checkout on the path of Python that was not installed
        return {}
    url = urlsplit(origin.get("url", ""))
    if "dir_info" not in origin or url.scheme != "file":
        return {}
    projects: dict[Path, dict[str, Any]] = {}
    for path in sorted(Path(unquote(url.path)).glob("plugins/podium-*/pyproject.toml")):
        with suppress(OSError, ValueError, KeyError):  # the clone is the user's, who may be at work in it
            projects[path.parent] = tomllib.loads(path.read_text())["project"]
    return projects
