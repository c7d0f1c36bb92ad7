"""The public contract suite: a backend's author imports it and names the backend."""

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium_testing.contract import BackendContract as BackendContract
    from podium_testing.target import Target as Target, need as need
else:  # the processes of the suite's workers need neither the tests nor what these import
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
