"""Ray's API as ``Any``: most of its own types are unknown to a type checker that is strict."""

from typing import Any

import ray as typed

__all__ = ["ray"]

ray: Any = typed
