"""Names of the files and folders of a run."""

import itertools
import os
import re
from pathlib import Path
from typing import Final

from podium.errors import ConfigError
from podium.spelling import explain_not_text, is_text

STATE_FILE: Final = "trainer.json"
"""The file in a checkpoint that holds the state of the controller."""

LOCK: Final = ".lock"

SET: Final = "set="
"""What precedes the name of an evaluation set in the name of the directory of its completions."""

_STEP: Final = re.compile(r"step-(\d{1,12})", re.ASCII)


def check_path(path: Path, what: str) -> Path:
    """Return ``path``. Raises ConfigError if its absolute path is not UTF-8, as the files of a run and safetensors
    need it."""
    for text in (str(path), str(path.absolute()), *([str(path.resolve())] if is_text(str(path)) else [])):
        if not is_text(text):
            remedy = "checkpoints cannot be written there, and config.yaml cannot name it; rename the directory or file"
            raise ConfigError(f"{what} is {text[:200]!r}, {explain_not_text(text, remedy)}")
    return path


def free_name(path: Path, joint: str = "-") -> Path:
    """Return ``path`` if it is not taken, else the first of NAME-1.EXT, NAME-2.EXT, … that is free."""
    numbered = (path.with_name(f"{path.stem}{joint}{number}{path.suffix}") for number in itertools.count(1))
    return next(candidate for candidate in itertools.chain([path], numbered) if not os.path.lexists(candidate))


def step_name(step: int) -> str:
    """Return the name under which files of ``step`` are written."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """Return the step whose ``step_name`` is ``name``; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None
