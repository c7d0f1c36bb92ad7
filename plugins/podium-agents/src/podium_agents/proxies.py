"""Agents reach the model of their run without the proxy that the environment names for the outside world."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

__all__ = ["spare_proxy"]

_NAMES: Final = ("no_proxy", "NO_PROXY")


def spare_proxy(url: str) -> str:
    """Return ``url``. HTTP clients that this process makes from now on, and processes that it starts, ask its host
    directly, also where ``http_proxy`` is set, as on many clusters. A proxy does not reach an address of this machine,
    and is not meant to read what agents send there.
    """
    host = urlsplit(url).hostname
    if host is None or not getproxies_environment():
        return url
    spared = [os.environ.get(name, "") for name in _NAMES]
    for name, hosts in zip(_NAMES, spared, strict=True):
        hosts = hosts or "".join(spared)  # libraries read one of the two alone
        entries = [entry.strip() for entry in hosts.split(",")]
        if host not in entries and "*" not in entries:
            os.environ[name] = ",".join([*filter(None, entries), host])
    return url
