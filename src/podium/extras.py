"""What the extras of Podium's packages install, as a command for somebody who has no index with Podium."""

import shlex
from importlib.metadata import PackageNotFoundError, requires

__all__ = ["explain_packages", "install_command"]


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


def explain_packages(group: str) -> str:
    """Return the end of an error on a name that no installed package has: which packages bring others, and how those of
    Podium's are installed. ``group`` is the group of entry points."""
    return (
        f"packages bring others through the entry point group {group}, and those of Podium's, podium-NAME, are "
        "installed in its clone by: pip install ./plugins/podium-NAME"
    )
