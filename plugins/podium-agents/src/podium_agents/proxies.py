"""Agents reach the model of their run, and services of this machine, without the proxy that the environment names for
the outside world."""

from __future__ import annotations

import ipaddress
import os
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

__all__ = ["spare_proxy"]

_NAMES: Final = ("no_proxy", "NO_PROXY")


def spare_proxy(url: str, *, only_here: bool = False) -> str:
    """Return ``url``. HTTP clients that this process makes from now on, and processes that it starts, ask its host
    directly, also where ``http_proxy`` is set, as on many clusters. A proxy does not reach an address of this machine,
    and is not meant to read what agents send there.

    Args:
        url: An address of HTTP or WebSocket.
        only_here: Do so only for an address of loopback, where the user has named the address.
    """
    host = urlsplit(url).hostname
    if host is None or not getproxies_environment() or (only_here and not _is_loopback(host)):
        return url
    spared = [os.environ.get(name, "") for name in _NAMES]
    for name, hosts in zip(_NAMES, spared, strict=True):
        hosts = hosts or "".join(spared)  # libraries read one of the two alone
        entries = [entry.strip() for entry in hosts.split(",")]
        if host not in entries and "*" not in entries:
            os.environ[name] = ",".join([*filter(None, entries), host])
    return url


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False
