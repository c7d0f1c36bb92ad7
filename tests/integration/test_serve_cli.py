"""``podium serve`` as a person runs it: a real command, real HTTP, a real end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

import podium
from podium.cli import main
from podium.errors import ConfigError
from podium.models import ModelConfig, char_tokenizer, load_model
from podium.processes import children_of
from podium.trainer import InferenceConfig, build_config
from podium_serve import served
from tests.integration.processes import listeners_of
from tests.lazy_module import import_when_used
from tests.waits import all_end, wait_until
from tests.warm_python import WarmPopen, run_python

import_when_used("openai")
pytest.importorskip("uvicorn")

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = char_tokenizer(ALPHABET, chat_template=TEMPLATE)
    settings = {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096,
        "vocab_size": len(tokenizer),
    }  # fmt: skip
    made = load_model(ModelConfig(config=settings, tokenizer=f"chars:{ALPHABET}"))
    made.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    return folder


def command(*words: str, token: str | None = "secret", **how: Any) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name != "PODIUM_TOKEN"}
    if token is not None:
        env["PODIUM_TOKEN"] = token
    return WarmPopen(
        [sys.executable, "-m", "podium", "serve", *words],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how,
    )  # fmt: skip


class Serving:
    """A command that answers, with what it has said so far."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        self.child, self.said = child, ""
        for line in child.stdout:
            self.said += line
            if line.startswith("Ctrl-C"):
                break
        assert "Ctrl-C" in self.said, child.communicate()
        found = re.search(r"answers at (http://\S+)/v1", self.said)
        assert found is not None
        self.url = found[1]

    def ask(self, path: str, body: Any = None, token: str = "secret", **headers: str) -> tuple[int, str]:
        content = None if body is None else json.dumps(body).encode()
        asked = Request(self.url + path, content, {"Authorization": f"Bearer {token}", **headers})
        try:
            with urlopen(asked, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    @property
    def processes(self) -> list[int]:
        """The command's descendants."""
        return [one for child in children_of(self.child.pid) for one in [child, *children_of(child)]]

    def begun(self, body: Any) -> socket.socket:
        """A connection by which a conversation is asked for."""
        content = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), timeout=60)
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
        head += f"Content-Length: {len(content)}"
        connection.sendall(f"{head}\r\n\r\n".encode() + content)
        return connection

    def end(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """The exit status and what was said on stderr."""
        workers = self.processes
        self.child.send_signal(number)
        _, errors = self.child.communicate(timeout=60)
        assert all_end(workers)
        return self.child.returncode, errors


@contextmanager
def serving(*words: str, **how: Any) -> Iterator[Serving]:
    child = command(*words, **how)
    try:
        yield Serving(child)
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        child.communicate()


def counted(text: str) -> Mapping[str, float]:
    """The samples of /metrics, by name and labels."""
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_a_person_serves_a_model_asks_it_and_ends_it(model: Path, tmp_path: Path) -> None:
    """The page asks for no number of tokens, so that the model's context is their limit."""
    small = Path(shutil.copytree(model, tmp_path / model.name))
    settings = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 256}))
    with serving(str(small), token=None) as served:
        given = re.search(r"OPENAI_API_KEY=(\S+)", served.said)
        assert given is not None
        token = given[1]
        assert len(token) > 30
        body = {"model": "tiny", "messages": [USER], "max_tokens": 5}
        assert served.ask("/v1/chat/completions", body)[0] == 401
        status, answer = served.ask("/v1/chat/completions", body, token)
        assert status == 200
        found = json.loads(answer)
        length, reason = found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]
        assert length == 5 if reason == "length" else 0 < length <= 5  # a random model ends when it likes
        env = {**os.environ, "OPENAI_BASE_URL": f"{served.url}/v1", "OPENAI_API_KEY": token}
        for language, block in re.findall(r"```(python|bash)\n(.*?)```", PAGE.read_text(), re.DOTALL)[:2]:
            with_name = block.replace('"NAME"', '"tiny"')
            if language == "bash":
                done = subprocess.run(["bash", "-c", with_name], env=env, capture_output=True, text=True, check=True)
            else:
                done = run_python("-c", with_name, env=env)
            assert done.stdout.strip() and '"error"' not in done.stdout, (block, done)
        status, errors = served.end()
        assert (status, errors) == (0, "loading tiny\n")
        assert "Traceback" not in served.said


def test_all_ranks_answer_and_are_counted_as_one_service(model: Path) -> None:
    with serving(str(model), "--placement.ranks", "2", "--name", "both", "--host", "0.0.0.0") as served:
        body = {"messages": [USER], "max_tokens": 4}
        for _ in range(4):
            assert served.ask("/v1/chat/completions", body)[0] == 200
        status, text = served.ask("/v1/chat/completions", {**body, "stream": True})
        assert (status, text.count("data: ")) == (200, text.count("data: {") + 1)
        assert json.loads(served.ask("/v1/models")[1])["data"][0]["id"] == "both"
        for _ in range(3):  # a session stays where it is, by path, header and body
            assert served.ask("/sessions/one/v1/chat/completions", body)[0] == 200
            assert served.ask("/v1/chat/completions", body, **{"X-Session-ID": "one"})[0] == 200
            assert served.ask("/v1/chat/completions", {**body, "metadata": {"session_id": "one"}})[0] == 200
        numbers = counted(served.ask("/metrics")[1])
        assert numbers['podium_requests_total{path="/v1/chat/completions",code="200"}'] == 14
        assert numbers["podium_sessions"] == 1
        endless = {"stream": True, "max_tokens": 3000, "n": 64, "logit_bias": {"2": -100}}  # without <eos>
        with served.begun({**body, **endless}) as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
            assert wait_until(lambda: counted(served.ask("/metrics")[1])["podium_tokens_in_flight"] > 0)
        assert wait_until(lambda: counted(served.ask("/metrics")[1])["podium_tokens_in_flight"] == 0)
        assert served.ask("/v1/chat/completions", body, "wrong")[0] == 401
        assert served.ask("/metrics", token="wrong")[0] == 401
        assert served.ask("/v1/chat/completions", {"messages": []})[0] == 400
        # one of the workers is killed, and the command says so and ends
        os.kill(next(one for one in served.processes if _listens(one)), signal.SIGKILL)
        _, errors = served.child.communicate(timeout=60)
        assert served.child.returncode == 2
        assert "the generator's worker of rank" in errors and "SIGKILL" in errors
        assert "other machines can reach it" in errors
        assert "secret" not in errors + served.said


def _listens(process: int) -> bool:
    with suppress(OSError):
        return bool(listeners_of(process)) and not children_of(process)
    return False


def test_a_script_serves_a_model_that_has_no_chat_template(model: Path) -> None:
    config = build_config(InferenceConfig, {"model": {"path": str(model)}, "data": {"chat_template": "none"}})
    with podium.connect("inline") as cluster, served(config, cluster, model="m", token="t") as found:
        assert not found.chats
        with urlopen(Request(f"{found.url}/v1/models", None, {"Authorization": "Bearer t"})) as answer:
            assert json.load(answer)["data"][0]["id"] == "m"
        asked = Request(f"{found.url}/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}]}')
        asked.add_header("Authorization", "Bearer t")
        with pytest.raises(HTTPError) as refused:
            urlopen(asked)
        with refused.value as error:
            assert (error.code, b"conversations need a chat template" in error.read()) == (400, True)
    with pytest.raises(ConfigError, match="token of a service is empty"), podium.connect("inline") as cluster:
        served(config, cluster, model="m", token="").__enter__()


def test_what_cannot_be_served_is_said_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, token, said in [
            ([str(model), "--port", port], "secret", f"cannot listen at 127.0.0.1:{port}: Address already in use"),
            (
                [str(model), "--port", "99999"],
                "secret",
                "99999: a port is a number from 0 to 65535; --port 0 takes one that is free",
            ),
            ([str(model)], "", "PODIUM_TOKEN is empty"),
            ([str(tmp_path / "none")], "secret", f"no run and no model at {tmp_path / 'none'}"),
            (["./nothing"], "secret", "no run and no model at ./nothing"),
            ([str(tmp_path)], "secret", "is no run (it has no config.yaml) and no model"),
            ([str(model), "--backend", "ray"], "secret", "podium serve answers on this machine, where"),
            ([str(model), "--colour", "red"], "secret", "colour"),
        ]:
            monkeypatch.setenv("PODIUM_TOKEN", token)
            status = main(["serve", *words])
            out, errors = capsys.readouterr()
            assert (status, out) == (2, "")
            *_, last = errors.splitlines()
            assert last.startswith("podium serve: ") and said in last
            assert errors in (last + "\n", f"loading {Path(words[0]).name}\n{last}\n")
