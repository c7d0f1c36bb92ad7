"""A launched process that sends the secret that it has."""

from __future__ import annotations

import os
import socket


def main() -> None:
    """Send it, and wait for the end of the channel."""
    from podium.processes import Channel

    channel = Channel(socket.socket(fileno=os.dup(0)))
    channel.send(1, os.environ["MY_API_KEY"].encode())
    channel.receive()
