"""``podium serve MODEL`` answers the OpenAI API with a model: a run, a checkpoint, a directory, or a hub name."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from podium.cli.connecting import parse_with_backend
from podium.cli.inference import connect, opened_config

__all__ = ["run_serve"]


def run_serve(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="podium serve",
        usage="podium serve MODEL [--SECTION.KEY VALUE ...] [options]",
        description="Answer the OpenAI API with a model: chat with tools, completions, ids in and out.",
        epilog="The token is PODIUM_TOKEN of the environment, or a new one. Clients send it as their API key.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a run, RUN@STEP, RUN@best, a model's directory, or a hub name")
    parser.add_argument("--config", metavar="FILE", help="YAML with any of the settings")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: this machine alone)")
    parser.add_argument("--port", type=int, default=0, help="the port (default: one that is free)")
    options, overrides, backend = parse_with_backend(parser, arguments, default="local")
    from podium.rollout.service.server import new_token
    from podium.trainer import served

    token = os.environ.get("PODIUM_TOKEN") or new_token()
    name = Path(options.model).name or options.model
    with (
        opened_config(options.model, options.config, overrides) as config,
        connect(backend) as cluster,
        served(config, cluster, model=name, token=token, host=options.host, port=options.port) as url,
    ):
        sys.stdout.write(f"{name} answers at {url}/v1\n\n  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={token}\n\n")
        sys.stdout.write("Ctrl-C ends it.\n")
        sys.stdout.flush()
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
    return 0
