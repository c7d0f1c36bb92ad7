"""``python -m podium``, the same as the command ``podium``."""

import sys

from podium.cli import main

sys.exit(main())
