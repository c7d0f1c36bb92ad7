"""Python's logging and warnings beside a progress bar: every line goes through one console, above the bar.

Rich's live display redirects ``sys.stdout`` and ``sys.stderr``, but a handler made earlier holds the real stream and
would write into the bar. `LogRouter` turns such handlers to the console while it is installed, gives the root logger
a handler if it has none, and puts everything back.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Final, TextIO, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.text import Text

from podium.telemetry.formatting import visible

__all__ = ["LogRouter"]

# Libraries whose warnings at work are about their own defaults. Their errors are shown.
_NOISY: Final = (
    *("accelerate", "datasets", "filelock", "fsspec", "httpcore", "httpx", "huggingface_hub", "matplotlib"),
    *("torch._dynamo", "torch._inductor", "torch.distributed", "transformers", "urllib3"),
)
_STYLES: Final = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}


def _within(name: str, libraries: tuple[str, ...]) -> bool:
    return any(name == library or name.startswith(library + ".") for library in libraries)


def _no_noise(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or not _within(record.name, _NOISY)


def _worth_showing(record: logging.LogRecord) -> bool:
    least = logging.INFO if _within(record.name, ("podium",)) else logging.WARNING
    return record.levelno >= least and _no_noise(record)


class _ConsoleHandler(logging.Handler):
    """One line a record: level if it is no plain remark, where it comes from, and the message."""

    def __init__(self, console: Console, shown_by: Callable[[logging.Logger], bool]) -> None:
        super().__init__(logging.INFO)
        self._console = console
        self._shown_by = shown_by
        self.addFilter(_worth_showing)
        self.addFilter(self._not_shown_already)

    def _not_shown_already(self, record: logging.LogRecord) -> bool:
        """Whether no handler between the record's logger and the root has put it on the terminal."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if self._shown_by(logger):
                return False
            logger = logger.parent if logger.propagate else None
        return True

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(self._text(record), highlight=False, soft_wrap=True)
        except Exception:  # noqa: BLE001 - logging's own rule: a handler reports through handleError
            self.handleError(record)

    def _text(self, record: logging.LogRecord) -> Text:
        style = _STYLES.get(record.levelno, "")
        if record.name == "py.warnings":
            # "path:line: Category: message\n  source": the message first, the place where it can be skipped.
            place, _, said = record.getMessage().strip().splitlines()[0].partition(": ")
            return Text.assemble(("warning", style), f"  {visible(said)}  ", (visible(place), "dim"))
        text = Text()
        if record.levelno >= logging.WARNING:
            text.append(record.levelname.lower(), style).append("  ")
        text.append(f"{record.name}  ", "dim").append(visible(record.getMessage()))
        if record.exc_info:
            text.append("\n" + visible(logging.Formatter().formatException(record.exc_info)), "dim")
        return text


class LogRouter:
    """Installs and removes the routing. `console` is the one with the bar; None: no bar, so handlers stay where they
    are, and the root logger gets one on stderr if it has none."""

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._handler = _ConsoleHandler(console or Console(stderr=True, highlight=False), self._has_its_own)
        self._moved: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        self._root_level: int | None = None
        self._captured_warnings = False

    def install(self) -> None:
        """Route from now on: what exists of handlers, the root logger and ``warnings``."""
        root = logging.getLogger()
        if not any(_stream_of(handler) for handler in root.handlers):
            root.addHandler(self._handler)
            if root.level > logging.INFO:
                # Records below the root's level would never reach the handler, which filters by itself.
                self._root_level = root.level
                root.setLevel(logging.INFO)
        for handler in _console_handlers():
            self._moved.append((handler, handler.stream))
            handler.addFilter(_no_noise)  # what a user logs through a handler of theirs is theirs to judge
            # One that looks its stream up each time follows the live display's redirection by itself.
            if self._console is not None and not isinstance(getattr(type(handler), "stream", None), property):
                handler.setStream(cast("TextIO", FileProxy(self._console, handler.stream)))
        if not _warnings_are_captured():
            logging.captureWarnings(True)
            self._captured_warnings = True

    def _has_its_own(self, logger: logging.Logger) -> bool:
        moved = [handler for handler, _ in self._moved]
        return any(handler in moved for handler in logger.handlers)

    def remove(self) -> None:
        """Put everything back as it was."""
        root = logging.getLogger()
        root.removeHandler(self._handler)
        if self._root_level is not None:
            root.setLevel(self._root_level)
            self._root_level = None
        for handler, stream in self._moved:
            handler.removeFilter(_no_noise)
            if handler.stream is not stream:
                handler.setStream(stream)
        self._moved.clear()
        if self._captured_warnings:
            logging.captureWarnings(False)
            self._captured_warnings = False


def _stream_of(handler: logging.Handler) -> TextIO | None:
    """The terminal stream that `handler` writes to, if it is one of those."""
    if not isinstance(handler, logging.StreamHandler) or isinstance(handler, logging.FileHandler):
        return None
    stream = cast("logging.StreamHandler[TextIO]", handler).stream
    return stream if stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__) else None


def _console_handlers() -> Iterator[logging.StreamHandler[TextIO]]:
    loggers = [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):  # not a placeholder
            for handler in logger.handlers:
                if _stream_of(handler) is not None:
                    yield cast("logging.StreamHandler[TextIO]", handler)


def _warnings_are_captured() -> bool:
    return getattr(logging, "_warnings_showwarning", None) is not None
