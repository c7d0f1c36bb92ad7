"""Who may ask a service: holders of one token, or of the key of a session, which reaches no other session."""

from __future__ import annotations

import base64
import hmac
import secrets
from typing import Final, Protocol

__all__ = ["Access", "OneToken", "SessionKeys", "root_of"]

_SECRET_BYTES: Final = 32


class Access(Protocol):
    """Says what the bearer of a token may reach."""

    def scope_of(self, credentials: str) -> str | None:
        """Return the session that a token is good for; "" for all of the service; None for a token that is unknown."""
        ...


class OneToken:
    """One token, which is good for all of a service."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def scope_of(self, credentials: str) -> str | None:
        """As :class:`Access`."""
        return "" if hmac.compare_digest(credentials.encode(), self._token) else None


class SessionKeys:
    """A key for each session, which follows from its name and a secret of this object: ``NAME.CODE``.

    A key is good for the session of its name and for the agents of that session (``NAME.critic``), and no key says
    whether a session exists.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(_SECRET_BYTES)

    def key_of(self, session: str) -> str:
        """Return the key of a session, or of the session that an agent belongs to."""
        name = root_of(session)
        code = hmac.digest(self._secret, name.encode("utf-8", "surrogatepass"), "sha256")
        return f"{name}.{base64.urlsafe_b64encode(code).decode().rstrip('=')}"

    def scope_of(self, credentials: str) -> str | None:
        """As :class:`Access`."""
        name = root_of(credentials)
        return name if name and hmac.compare_digest(credentials.encode(), self.key_of(name).encode()) else None


def root_of(session: str) -> str:
    """Return the name of the session that an agent of this name belongs to; a session's own name as it is."""
    return session.partition(".")[0]
