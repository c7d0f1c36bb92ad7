"""Environments: where the policy acts in several turns, with tools, or by an agent of its own."""

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium.errors import ContextFull as ContextFull
    from podium.rollout.environments.calls import in_thread as in_thread
    from podium.rollout.environments.client import Client as Client, Reply as Reply
    from podium.rollout.environments.config import EnvironmentConfig as EnvironmentConfig
    from podium.rollout.environments.contract import (
        Environment as Environment,
        Outcome as Outcome,
        Step as Step,
        Task as Task,
    )
    from podium.rollout.environments.mcp import mcp_tools as mcp_tools
    from podium.rollout.environments.resolve import converse as converse
    from podium.rollout.environments.tools import (
        Tool as Tool,
        Toolbox as Toolbox,
        ToolError as ToolError,
        tool as tool,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
