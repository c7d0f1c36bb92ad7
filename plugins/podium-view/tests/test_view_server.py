"""The server of ``podium view`` answers to who has its address, and to nobody else."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from podium.cli import main
from podium.errors import ConfigError
from podium_view.run import Run
from podium_view.server import ViewServer


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: http.client.HTTPMessage


@pytest.fixture
def server(run_with_trouble: Path) -> Iterator[ViewServer]:
    with ViewServer([Run(run_with_trouble, "made")]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: ViewServer, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    response = connection.getresponse()
    answer = Answer(response.status, response.read(), response.headers)
    connection.close()
    return answer


def add_key(server: ViewServer, path: str) -> str:
    return f"/{server.token}/{path}"


def test_who_has_the_address_gets_the_page_and_its_answers(server: ViewServer) -> None:
    page = ask(server, add_key(server, ""))
    assert page.status == 200
    assert b"<title>made" in page.body
    assert json.loads(ask(server, add_key(server, "runs")).body)[0]["name"] == "made"
    assert json.loads(ask(server, add_key(server, "0/steps")).body) == [1, 2, 3]
    assert len(json.loads(ask(server, add_key(server, "state")).body)) == 1
    assert ask(server, add_key(server, "0/steps"), "HEAD").body == b""
    for path in ("1/steps", "x/steps", "0/", "0/nothing", "0/groups/x", "-1/steps"):
        assert ask(server, add_key(server, path)).status == 404
    missing = ask(server, add_key(server, "0/groups/99"))
    assert (missing.status, json.loads(missing.body)) == (422, {"error": "step 99 has no completions"})


def test_it_listens_on_loopback_alone(server: ViewServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    for family, _, _, _, address in socket.getaddrinfo(socket.gethostname(), server.server_port, socket.AF_INET):
        if not str(address[0]).startswith("127."):
            with socket.socket(family) as other, pytest.raises(OSError):
                other.connect(address)


@pytest.mark.parametrize(
    "path", ["/", "/runs", "/x/runs", "/0/steps", "//runs", "/../runs", "/%2e%2e/runs", "/" + "A" * 43 + "/runs"]
)
def test_without_the_key_nothing_is_answered(server: ViewServer, path: str) -> None:
    answer = ask(server, path)
    assert answer.status == 403
    assert b"whole address" in answer.body


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "", "[", "0.0.0.0", "127.0.0.1@evil.example"],
)
def test_a_name_that_was_bound_anew_to_loopback_is_refused(server: ViewServer, host: str) -> None:
    answer = ask(server, add_key(server, "runs"), Host=host.format(port=server.server_port))
    assert answer.status == 403
    assert b"made" not in answer.body


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "localhost:8000", "LOCALHOST", "[::1]:80"])
def test_loopback_by_any_name_and_a_forwarded_port_are_answered(server: ViewServer, host: str) -> None:
    assert ask(server, add_key(server, "runs"), Host=host.format(port=server.server_port)).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_another_page_in_the_same_browser_is_refused(server: ViewServer, headers: dict[str, str]) -> None:
    assert ask(server, add_key(server, "runs"), **headers).status == 403


def test_the_page_itself_is_answered(server: ViewServer) -> None:
    origin = f"http://127.0.0.1:{server.server_port}"
    answer = ask(server, add_key(server, "runs"), Origin=origin, Sec_Fetch_Site="same-origin")
    assert answer.status == 200
    assert answer.headers["Access-Control-Allow-Origin"] is None
    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert answer.headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path",
    [
        "../../../../etc/passwd",
        "0/../../config.yaml",
        "0/config.yaml",
        "0//etc/passwd",
        "%2e%2e/%2e%2e/etc/passwd",
        "0/logs/policy-1.log",
    ],
)
def test_no_path_leads_to_a_file(server: ViewServer, path: str) -> None:
    answer = ask(server, add_key(server, path))
    assert answer.status == 404
    assert json.loads(answer.body) == {"error": "there is no such page"}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_only_reads(server: ViewServer, method: str) -> None:
    assert ask(server, add_key(server, "runs"), method).status == 501


def test_a_port_that_is_taken_is_named(server: ViewServer, run_with_trouble: Path) -> None:
    with pytest.raises(ConfigError, match=f"port {server.server_port} of 127.0.0.1 cannot be used"):
        ViewServer([Run(run_with_trouble, "made")], server.server_port)


def test_the_command_serves_until_it_is_interrupted_and_imports_no_torch(run_with_trouble: Path) -> None:
    script = (
        "import sys; from podium.cli import main; status = main(['view', sys.argv[1]])\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'rich'} & set(sys.modules))); sys.exit(status)"
    )
    command = [sys.executable, "-c", script, str(run_with_trouble)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        match = re.fullmatch(r"made: http://127\.0\.0\.1:(\d+)(/[\w-]{43}/)\n", process.stdout.readline())
        assert match is not None
        connection = http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=60)
        connection.request("GET", f"{match[2]}0/steps")
        assert json.loads(connection.getresponse().read()) == [1, 2, 3]
        connection.close()
        os.kill(process.pid, signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(60) == 0
    assert rest.endswith("[]\n")


def test_a_directory_of_runs_is_all_of_them_by_names_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a/one", "a/two", "b/one"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
    (tmp_path / "a" / "other").mkdir()
    file = tmp_path / "runs.html"
    folders = [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "a" / "two")]
    assert main(["view", *folders, "--export", str(file)]) == 0
    assert "<title>a/one, two, b/one · podium view</title>" in file.read_text()
    (tmp_path / "a" / "one" / "inner").mkdir()
    (tmp_path / "a" / "one" / "inner" / "config.yaml").touch()
    assert main(["view", str(tmp_path / "a" / "one"), "--export", str(file)]) == 0
    assert "<title>one, inner · podium view</title>" in file.read_text(), "as podium runs lists them"
    for number in range(33):
        (tmp_path / "many" / str(number)).mkdir(parents=True)
        (tmp_path / "many" / str(number) / "config.yaml").touch()
    assert main(["view", str(tmp_path / "many")]) == 2
    assert "33 runs were named" in capsys.readouterr().err


def test_wrong_directories_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "none")]) == 2
    assert "this directory does not exist" in capsys.readouterr().err
    assert main(["view", str(tmp_path)]) == 2
    assert "no run is here" in capsys.readouterr().err
