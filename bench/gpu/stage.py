"""One stage in a process of its own: `python -m bench.gpu.stage MODULE:FUNCTION RESULT`.

Each figure is written to the file RESULT as soon as it is known, so that a stage that is killed keeps those before.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

NO_DEVICE = "skipped: no CUDA device"


class Skipped(Exception):
    """Ends a stage that cannot run here. The text is the reason."""


def write_whole(path: Path, value: object) -> None:
    """Write JSON so that a reader finds the old file or the new one, and never a part, whenever the writer dies."""
    text = json.dumps(value, indent=1) + "\n"
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


class Stage:
    """What a stage is given: the device, whether shapes are tiny, and where its figures go.

    Args:
        result: The file that gets the figures.
        dry: Whether the stage runs on the CPU with tiny shapes, to show that its code runs.
        seconds: How long the runner waits for the stage.
    """

    def __init__(self, result: Path, *, dry: bool, seconds: float = math.inf) -> None:
        self.dry = dry
        self._until = time.monotonic() + seconds
        self._result = result
        self._found: dict[str, Any] = {"figures": {}, "facts": {}, "skipped": {}, "failures": []}
        self._device: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """The first CUDA device; the CPU in a dry run.

        Raises:
            RuntimeError: torch sees no CUDA device, and the run is not dry.
        """
        import torch

        if self._device is None:
            if not self.dry and not torch.cuda.is_available():
                raise RuntimeError(f"torch {torch.__version__} sees no CUDA device; --dry runs on a CPU")
            self._device = torch.device("cpu" if self.dry else "cuda:0")
            if not self.dry:
                torch.cuda.set_device(self._device)
        return self._device

    @property
    def on_gpu(self) -> bool:
        return not self.dry and self.device.type == "cuda"

    @property
    def gpus(self) -> int:
        """What a slot of a pool reserves: the whole GPU, or none in a dry run."""
        return int(self.on_gpu)

    @property
    def left_s(self) -> float:
        """Seconds until the runner ends this stage."""
        return self._until - time.monotonic()

    @property
    def failures(self) -> list[str]:
        return self._found["failures"]

    def figure(self, name: str, value: float, unit: str) -> None:
        """Keep a figure with its unit."""
        self._found["figures"][name] = {"value": float(f"{value:.4g}"), "unit": unit}
        self._keep(f"{name} {value:.4g} {unit}")

    def fact(self, name: str, text: object) -> None:
        """Keep a sentence or a name."""
        self._found["facts"][name] = str(text)
        self._keep(f"{name}: {text}")

    def expect(self, name: str, value: float, most: float, unit: str) -> None:
        """Keep a figure that must be at most ``most``: the stage goes on, and fails at its end where it is not."""
        self.figure(name, value, unit)
        if not value <= most:  # NaN is not
            self.failures.append(f"{name} is {value:.3g} {unit}, and at most {most:.3g} is right")
            self._keep(self.failures[-1])

    def part(self, name: str, attempt: Callable[[], None], *, cuda: bool = False) -> None:
        """Run one part of the stage, so that the others go on where it fails. With ``cuda`` a CPU skips it."""
        if cuda and not self.on_gpu:
            self.leave_out(name, NO_DEVICE.removeprefix("skipped: "))
            return
        try:
            attempt()
        except Skipped as reason:
            self.leave_out(name, str(reason))
        except Exception as error:  # noqa: BLE001 - what a kernel, a driver or a library raises is the result
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {first_line(error)}")
            self._keep(self.failures[-1])

    def leave_out(self, name: str, reason: str) -> None:
        """Keep why a part of the stage was not run."""
        self._found["skipped"][name] = reason
        self._keep(f"{name} skipped: {reason}")

    def skip(self, reason: str) -> NoReturn:
        """End the stage, which cannot run here."""
        raise Skipped(reason)

    def end(self, status: str, message: str = "") -> None:
        self._found |= {"status": status, "message": message}
        self._keep("")

    def _keep(self, line: str) -> None:
        write_whole(self._result, self._found)
        if line:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else ""


def end_with_parent() -> None:
    """End this process when its standard input, of which the runner holds the other end, is closed."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("function")
    parser.add_argument("result", type=Path)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_args()
    end_with_parent()
    stage = Stage(options.result, dry=options.dry, seconds=options.seconds)
    module, _, name = options.function.partition(":")
    try:
        getattr(importlib.import_module(module), name)(stage)
    except Skipped as reason:
        stage.end("skipped", str(reason))
        return 0
    except Exception as error:  # noqa: BLE001 - the runner writes it down and goes on with the next stage
        traceback.print_exc()
        stage.end("failed", "; ".join([*stage.failures, f"{type(error).__name__}: {first_line(error)}"]))
        return 1
    stage.end("failed" if stage.failures else "passed", "; ".join(stage.failures))
    return int(bool(stage.failures))


if __name__ == "__main__":
    sys.exit(main())
