"""Log records and warnings go through the console of the progress bar, and appear above the bar.

Rich's live display redirects ``sys.stdout`` and ``sys.stderr``, but a handler made earlier holds the real stream and
would write into the bar. While `LogRouter` is installed, such handlers write to the console, and the root logger has a
handler if it had none. Removing it restores the former state.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final, TextIO, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.text import Text

from podium.telemetry.bus import AS_EVENT
from podium.telemetry.formatting import visible

# Libraries whose warnings at work are about their own defaults. Their errors are shown.
_NOISY: Final = (
    *("accelerate", "datasets", "filelock", "fsspec", "httpcore", "httpx", "huggingface_hub", "matplotlib"),
    *("torch._dynamo", "torch._inductor", "torch.distributed", "transformers", "urllib3"),
)
_STYLES: Final = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}
_Handler = logging.StreamHandler[TextIO]


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    if hasattr(record, AS_EVENT):  # the terminal shows the event
        return False
    return record.levelno >= logging.ERROR or not _belongs_to(record.name, *_NOISY)


def _belongs_to(name: str, *libraries: str) -> bool:
    return f"{name}.".startswith(tuple(f"{library}." for library in libraries))


class LogRouter(logging.Handler):
    """Installs and removes the routing, and shows on one line each record that no other handler shows.

    Args:
        console: The console with the bar. None means that there is no bar: handlers stay where they are, and the root
            logger gets one on stderr if it has none.
    """

    def __init__(self, console: Console | None) -> None:
        super().__init__(logging.INFO)
        self._live = console is not None
        self._console = console or Console(stderr=True, highlight=False)
        self._moved: list[_Handler] = []
        self._undo = ExitStack()

    def install(self) -> None:
        """Route the records of existing handlers, of the root logger and of ``warnings`` from now on."""
        root = logging.getLogger()
        if not any(_writes_to_terminal(handler) for handler in root.handlers):
            root.addHandler(self)
            self._undo.callback(root.removeHandler, self)
            if root.level > logging.INFO:  # records below the root's level would never reach this handler's own filter
                self._undo.callback(root.setLevel, root.level)
                root.setLevel(logging.INFO)
        for handler in _terminal_handlers():
            self._moved.append(handler)
            handler.addFilter(_is_worth_a_line)
            self._undo.callback(handler.removeFilter, _is_worth_a_line)
            # A handler that looks its stream up for each record follows the live display's redirection by itself.
            if self._live and not isinstance(getattr(type(handler), "stream", None), property):
                self._undo.callback(handler.setStream, handler.stream)
                handler.setStream(cast("TextIO", FileProxy(self._console, handler.stream)))
        if getattr(logging, "_warnings_showwarning", None) is None:  # nobody captures warnings yet
            logging.captureWarnings(True)
            self._undo.callback(logging.captureWarnings, False)

    def remove(self) -> None:
        """Put everything back as it was."""
        self._undo.close()
        self._moved.clear()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is worth showing, and no handler between its logger and the root has shown it."""
        if record.levelno < (logging.INFO if _belongs_to(record.name, "podium") else logging.WARNING):
            return False
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler in self._moved for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return _is_worth_a_line(record)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(_text(record), highlight=False, soft_wrap=True)
        except Exception:  # noqa: BLE001 - logging's own rule: a handler reports through handleError
            self.handleError(record)


def _text(record: logging.LogRecord) -> Text:
    """One line with the level from WARNING on, the name of the logger, and the message."""
    style = _STYLES.get(record.levelno, "")
    if record.name == "py.warnings":
        # "path:line: Category: message\n  source": the message first, the place where it can be skipped.
        source, _, message = record.getMessage().strip().splitlines()[0].partition(": ")
        return Text.assemble(("warning", style), f"  {visible(message)}  ", (visible(source), "dim"))
    text = Text()
    if record.levelno >= logging.WARNING:
        text.append(record.levelname.lower(), style).append("  ")
    text.append(f"{record.name}  ", "dim").append(visible(record.getMessage()))
    if record.exc_info:
        text.append("\n" + visible(logging.Formatter().formatException(record.exc_info)), "dim")
    return text


def _writes_to_terminal(handler: logging.Handler) -> bool:
    if not isinstance(handler, logging.StreamHandler) or isinstance(handler, logging.FileHandler):
        return False
    return cast("_Handler", handler).stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)


def _terminal_handlers() -> Iterator[_Handler]:
    for logger in [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]:
        if isinstance(logger, logging.Logger):  # not a placeholder
            yield from (cast("_Handler", handler) for handler in logger.handlers if _writes_to_terminal(handler))
