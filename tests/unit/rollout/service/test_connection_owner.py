"""Another user of this machine: refused at the loopback, and asked for the token where others reach the service."""

from __future__ import annotations

import os

import pytest

from tests.integration.test_serve import NOBODY, OTHER_USERS, WITH_IPV6, asked_by
from tests.unit.rollout.service.scripted import TOKEN, posted, scripted

pytest.importorskip("uvicorn")


@OTHER_USERS
@pytest.mark.parametrize(
    ("host", "at", "status"),
    [
        ("127.0.0.1", "127.0.0.1", "403"),
        ("localhost", "127.0.0.1", "403"),
        ("0.0.0.0", "127.0.0.1", "200"),
        pytest.param("::1", "[::1]", "403", marks=WITH_IPV6),
        pytest.param("::", "[::1]", "200", marks=WITH_IPV6),
        pytest.param("::", "127.0.0.1", "200", marks=WITH_IPV6),
    ],
)
def test_what_the_host_says_decides_about_other_users(host: str, at: str, status: str) -> None:
    from podium_serve.app import make_app
    from podium_serve.server import Server

    service, _, _ = scripted()
    with Server(make_app(service, TOKEN), host) as server:
        url = f"http://{at}:{server.url.rpartition(':')[2]}"
        assert asked_by(NOBODY, f"{url}/v1/models").startswith(status)
        assert asked_by(os.geteuid(), f"{url}/v1/models").startswith("200")
        assert posted(f"{url}/v1/completions", {}, token="wrong")[0] == 401
