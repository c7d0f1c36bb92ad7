"""Sessions of agents: environments, where the policy acts in several turns, with tools, or by an agent of its own."""

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium.errors import ContextFull as ContextFull
    from podium_agents.environments.calls import in_thread as in_thread
    from podium_agents.environments.client import Client as Client, Reply as Reply
    from podium_agents.environments.contract import (
        Environment as Environment,
        Outcome as Outcome,
        SessionError as SessionError,
        Step as Step,
        Task as Task,
    )
    from podium_agents.environments.mcp import mcp_tools as mcp_tools
    from podium_agents.environments.resolve import converse as converse
    from podium_agents.environments.tools import (
        Tool as Tool,
        Toolbox as Toolbox,
        ToolError as ToolError,
        tool as tool,
    )
    from podium_agents.rollout import Rollout as Rollout
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
