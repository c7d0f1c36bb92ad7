"""The backend ``monarch``: one Monarch proc a rank, on this machine."""

from podium.extras import install_command
from podium.installed import has_library
from podium.runtime.backend import CONTRACT_VERSION

if CONTRACT_VERSION != 1:
    raise ImportError(
        f"podium-monarch implements version 1 of Podium's contract, and this Podium has version {CONTRACT_VERSION}: "
        "install both from one clone"
    )
if not has_library("monarch"):
    raise ImportError(f"torchmonarch is not installed: {install_command('monarch', package='podium-monarch')}")

from podium_monarch.backend import MonarchBackend

__all__ = ["MonarchBackend"]
