"""What a run would do, read, hold and take, before it starts: ``podium train RECIPE --dry-run``. See ``command.py``."""

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium_dryrun.data import describe_data as describe_data
    from podium_dryrun.memory import describe_memory as describe_memory
    from podium_dryrun.plan import describe_plan as describe_plan
    from podium_dryrun.times import describe_times as describe_times
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
