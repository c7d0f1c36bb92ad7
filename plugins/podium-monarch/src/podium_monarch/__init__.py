"""The backend ``monarch``: one Monarch proc a rank, on this machine."""

from importlib.util import find_spec

from podium.extras import install_command
from podium.runtime.backend import CONTRACT_VERSION

if CONTRACT_VERSION != 1:
    raise ImportError(
        f"podium-monarch implements version 1 of Podium's contract, and this Podium has version {CONTRACT_VERSION}: "
        "install both from one clone"
    )
if (_spec := find_spec("monarch")) is None or _spec.origin is None:  # a folder of this name is no library
    raise ImportError(f"torchmonarch is not installed: {install_command('monarch', package='podium-monarch')}")

from podium_monarch.backend import MonarchBackend

__all__ = ["MonarchBackend"]
