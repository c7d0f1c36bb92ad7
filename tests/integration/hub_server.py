"""A Hugging Face hub on this machine: it takes what ``huggingface_hub`` pushes, and keeps it in memory."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Final, cast
from urllib.parse import urlsplit

__all__ = ["TOKEN", "Hub", "hub_server"]

TOKEN: Final = "hf_of_a_test"
LARGE: Final = 2048  # bytes from which a file is pushed by LFS


class Hub(ThreadingHTTPServer):
    """The repositories of the user ``me``: the settings of each, and the content of its files by their paths.

    Attributes:
        calls: What was asked, in order: ``POST /api/repos/create``.
        refused: Beginnings of calls that get the status 403, each once.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.settings: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.by_lfs: set[str] = set()
        self.calls: list[str] = []
        self.refused: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return cast("Hub", self.server)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = self._begun()
        if path is None:
            return
        repository = "/".join(path.removeprefix("/api/models").split("/")[1:3]).removesuffix(".git")
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif repository not in self.hub.files:
            self._answer({"error": "Repository not found"}, 404)
        elif path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            modes = [
                {"path": one["path"], "uploadMode": "lfs" if one["size"] >= LARGE else "regular", "shouldIgnore": False}
                for one in files
            ]
            self._answer({"files": modes})
        elif path.endswith("/info/lfs/objects/batch"):
            self._answer({"objects": [self._action(one) for one in json.loads(body)["objects"]]})
        elif path.endswith("/commit/main"):
            self._commit(repository, [json.loads(line) for line in body.splitlines()])
        else:
            self._answer({}, 404)

    def do_GET(self) -> None:
        path = self._begun()  # the client asks for other things as well, and needs no answer to that
        if path is None:
            return
        name = path.removeprefix("/api/models/")
        if name not in self.hub.settings:
            return self._answer({"error": "Repository not found"}, 404)
        private = self.hub.settings[name].get("visibility") == "private"
        self._answer({"id": name, "private": private, "tags": [], "siblings": []})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        path = self._begun(signed=True)
        if path is not None:
            oid = path.rpartition("/")[2]
            assert hashlib.sha256(content).hexdigest() == oid
            self.hub.blobs[oid] = content
            self._answer({})

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _begun(self, signed: bool = False) -> str | None:
        """The path that is asked for; None where the answer is a refusal. A signed address needs no token."""
        path = urlsplit(self.path).path
        self.hub.calls.append(f"{self.command} {path}")
        if not signed and self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid username or password."}, 401)
        if once := next((one for one in self.hub.refused if self.hub.calls[-1].startswith(one)), None):
            self.hub.refused.remove(once)
            return self._answer({"error": "You don't have the rights"}, 403)
        return path

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        there = name in self.hub.files
        self.hub.files.setdefault(name, {})
        self.hub.settings.setdefault(name, asked)
        self._answer({"url": f"{self.hub.url}/{name}"}, 409 if there else 200)

    def _action(self, one: dict[str, Any]) -> dict[str, Any]:
        upload = {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}
        return {**one, **({} if one["oid"] in self.hub.blobs else {"actions": upload})}

    def _commit(self, repository: str, lines: list[dict[str, Any]]) -> None:
        files = self.hub.files[repository]
        for kind, value in ((line["key"], line["value"]) for line in lines):
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
                self.hub.by_lfs.add(value["path"])
        url = f"{self.hub.url}/{repository}/commit/{'0' * 40}"
        self._answer({"success": True, "commitOid": "0" * 40, "commitUrl": url, "hookOutput": ""})

    def _answer(self, values: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub that answers during the block. ``HF_ENDPOINT`` is its ``url``."""
    with Hub() as hub:
        thread = Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
