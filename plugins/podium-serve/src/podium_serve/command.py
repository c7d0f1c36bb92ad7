"""``podium serve MODEL`` answers the OpenAI API with a model: a run, a checkpoint, a directory, or a hub name."""

import contextlib
import ipaddress
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from podium.cli.connecting import parse_with_backend
from podium.cli.spinner import StatusSink
from podium.errors import ConfigError
from podium.processes import close_memory
from podium.runtime.connecting import backend_class
from podium.trainer.preload import PRELOAD
from podium_inference.command import connect, model_parser, open_config
from podium_inference.unread_settings import list_unread_by_service
from podium_serve import check_serving, served

__all__ = ["run_serve"]

_TOKEN = "PODIUM_TOKEN"


def run_serve(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C. Returns the exit status."""
    parser = model_parser(
        "serve",
        "Answer the OpenAI API with a model: chat with tools, completions, token ids in and out.",
        f"Clients send a token as their API key. The token is the value of the environment variable {_TOKEN}, or a new "
        "token, which podium serve prints. --placement.ranks N answers with N worker processes.",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="the name of the model for clients (default: the last part of MODEL)"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address to listen at (default: loopback, for this machine only)"
    )
    parser.add_argument("--port", type=int, default=0, help="the port (default: a free port)")
    options, overrides, backend = parse_with_backend(parser, arguments, default="local")
    if not backend_class(backend.name, backend.options).capabilities.this_machine:
        raise ConfigError(
            f"--backend {backend.name}: podium serve answers on this machine, where the workers of this backend need "
            "not be; leave --backend out"
        )
    environment_token, name = os.environ.get(_TOKEN), options.name or Path(options.model).name or options.model
    if environment_token is not None and not environment_token.strip():
        raise ConfigError(f"{_TOKEN} is empty: set it to a token, or unset it to get a new token")
    close_memory()
    token = environment_token or secrets.token_urlsafe(32)
    check_serving(options.host, options.port, token)
    with contextlib.ExitStack() as stack:
        with StatusSink(f"loading {name}"):
            backend_class(backend.name, backend.options).prepare(PRELOAD)  # while this process imports
            config = stack.enter_context(open_config(options.model, options.config, overrides, list_unread_by_service))
            cluster = stack.enter_context(connect(backend))
            where = {"model": name, "token": token, "host": options.host, "port": options.port}
            model = stack.enter_context(served(config, cluster, **where))
        _tell(name, model.url, options.host, token if environment_token is None else f"${_TOKEN}")
        if not model.chats:
            sys.stderr.write(
                "The model has no chat template: /v1/completions works, and /v1/chat/completions does not. Give a "
                "Jinja file with --data.chat_template.\n"
            )
        try:
            model.wait()
        except KeyboardInterrupt:
            sys.stdout.write("\n" if sys.stdout.isatty() else "")
    return 0


def _tell(name: str, url: str, host: str, key: str) -> None:
    sys.stdout.write(
        f"{name} answers at {url}/v1\n\n"
        f"  export OPENAI_BASE_URL={url}/v1\n  export OPENAI_API_KEY={key}\n\n"
        "Ctrl-C ends it.\n"
    )
    sys.stdout.flush()
    if not _is_loopback(host):
        sys.stderr.write(
            f"The service listens at {host}: other machines can reach it. Requests are not encrypted, and anyone "
            "with the token may send them.\n"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
