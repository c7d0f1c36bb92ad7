"""The command ``podium``, and ``python -m podium``."""

import sys


def main() -> int:
    """Run the command. Returns the exit status."""
    try:
        from podium.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("podium: interrupted\n")
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
