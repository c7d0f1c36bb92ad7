"""The line of JSON between the bench and a peer's process: results, errors and ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.peer import PEERS, PeerError, start_peer

ECHO_PEER = """
import os, sys
sys.path.insert(0, {peers!r})
from protocol import Peer

def double(value):
    print("noise on standard output")
    return 2 * value

def leave():
    os._exit(3)

Peer().serve({{"double": double, "leave": leave}})
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "peer.py"
    script.write_text(ECHO_PEER.format(peers=str(PEERS)))
    return [sys.executable, str(script)]


def test_results_return_and_noise_goes_to_the_log(command: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with start_peer(command, log) as peer:
        assert [peer.call("double", value=value) for value in (1, 2)] == [2, 4]
    assert log.read_text().splitlines() == ["noise on standard output"] * 2


def test_an_exception_in_the_peer_is_raised_here_and_the_peer_lives_on(command: list[str], tmp_path: Path) -> None:
    with start_peer(command, tmp_path / "log") as peer:
        with pytest.raises(PeerError, match=r"TypeError.*unsupported operand"):
            peer.call("double", value={})
        assert peer.call("double", value=3) == 6


def test_a_peer_that_ends_is_an_error_with_its_code(command: list[str], tmp_path: Path) -> None:
    with start_peer(command, tmp_path / "log") as peer, pytest.raises(PeerError, match="code 3"):
        peer.call("leave")
