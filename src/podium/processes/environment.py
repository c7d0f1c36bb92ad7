"""The filter of secrets: which variables of the environment a user's code does not see."""

import os
import re
from collections.abc import Collection
from typing import Final

__all__ = ["find_secrets"]

_SECRET: Final = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|KEY|COOKIE|AUTH)S?(_|$)|_(PASS|PWD)$|^AWS_", re.IGNORECASE
)


def find_secrets(allowed: Collection[str] = ()) -> list[str]:
    """Return the names of this process's variables that look like secrets, except those that are ``allowed``."""
    return [name for name in os.environ if _SECRET.search(name) and name not in allowed]
