"""A headless Chromium for tests, driven over two pipes by its DevTools protocol. Nothing of it is installed by pip.

python -m tests.chromium FILE.png VIEW RUN…    # a picture, of VIEW such as completions/0/12/3
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

__all__ = ["CHROMIUM", "Chromium"]

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)


class Chromium:
    """One page of ``width`` x ``height`` points. ``requests`` are the addresses that it has asked for."""

    def __init__(self, width: int = 1280, height: int = 900, *, dark: bool = False, flags: Sequence[str] = ()) -> None:
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read_there, self._write = os.pipe()
        self._read, write_there = os.pipe()
        script = f'exec "$@" 3<&{read_there} 4>&{write_there}'
        words = ["bash", "-c", script, "bash", CHROMIUM, *_FLAGS, *flags, f"--user-data-dir={self._folder.name}"]
        words += [f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            words, pass_fds=(read_there, write_there), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(read_there)
        os.close(write_there)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        found = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        if dark:
            self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._read, 1 << 16)
            if not more:
                raise RuntimeError("Chromium has ended")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(message["params"]["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(message["params"]["entry"]["text"])
            case _:
                pass
        return message

    def open(self, url: str) -> None:
        """Go to ``url``, and wait until the page says that its view is there."""
        self.call("Page.navigate", url=url)
        self.wait("document.body && document.body.dataset.ready")

    def show(self, address: str) -> None:
        """Go to another view of the same page, such as ``completions/0/2``."""
        self.run(f"delete document.body.dataset.ready; location.hash = {json.dumps(address)}")
        self.wait("document.body.dataset.ready")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def wait(self, condition: str, timeout_s: float = 60.0) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + timeout_s
        while not (found := self.run(condition)):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition}; the page shows: {self.run('document.body.innerText')[:2000]}")
            time.sleep(0.02)
        return found

    def key(self, name: str) -> None:
        """Press a key, such as ``ArrowRight``."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of what is seen, or of the whole page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._folder.cleanup()


if __name__ == "__main__":
    from podium_view.run import Run
    from podium_view.server import ViewServer

    file, view, *runs = sys.argv[1:]
    with ViewServer([Run(Path(run), Path(run).name) for run in runs]) as server, Chromium(height=760) as browser:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        browser.open(server.url)
        browser.show(view)
        browser.picture(Path(file))
