"""Settings of an environment, the way from its name to what the name stands for, and the way to the package that runs
sessions in it: Podium itself runs none. Imports no torch.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from typing import Any, Final, Protocol, cast

from pydantic import Field

from podium.config import build_config, section
from podium.errors import ConfigError
from podium.extras import explain_packages
from podium.functions import check_function_name, explain_raised, find_installed, load_function, load_installed, nearest
from podium.installed import list_entry_points

__all__ = [
    "BUDGETS",
    "EnvironmentConfig",
    "SessionLimits",
    "SessionPackage",
    "find_environments",
    "find_rollout_worker",
    "load_environment",
    "load_rollout_worker",
    "load_sessions",
]

BUDGETS: Final[Mapping[str, str]] = {
    "turn_limit": "answers",
    "sampled_limit": "sampled tokens",
    "read_limit": "tokens of prompts",
    "tool_call_limit": "calls of tools",
}
"""What is counted in a session, by the name of the option that limits it."""

_KEY: Final = "environment.name"
_GROUP: Final = "podium.environments"
_SESSIONS: Final = "podium.sessions"


class SessionPackage(Protocol):
    """What the entry point ``sessions`` of the group ``podium.sessions`` is: a module or an object with these names.

    The entry point ``rollout`` of the group is the class of the workers of this role.

    Attributes:
        Sessions: Makes one object of all rollout workers (:class:`podium.trainer.sessions.Sessions`) of their handle,
            the handles of the generators that they ask, the configuration, the sampling parameters, the directory of
            logs, and the handles of all generators.
        resolve_environment: Returns the environment that a configuration names, with its ``tasks``.
        load_tasks: Returns the :class:`podium.trainer.prompts.Tasks` of "train" or "test".
        check_conversations: Checks that the tokenizer has a template, by which sessions write conversations.
        conversations: Returns the text of each row of sessions, turn by turn.
    """

    Sessions: Callable[..., Any]
    resolve_environment: Callable[["EnvironmentConfig"], Any]
    load_tasks: Callable[..., Any]
    check_conversations: Callable[..., None]
    conversations: Callable[..., Any]

    def list_arguments(self, environment: "EnvironmentConfig") -> dict[str, Any]:
        """Return further arguments of the constructor of the role ``rollout``. Raises ConfigError if one is missing."""
        ...

    def check_services(self, environment: "EnvironmentConfig", *, apart: bool) -> None:
        """Check that a package speaks HTTP, where sessions need one that is known before they begin. ``apart`` says
        that generators are in processes of their own. Raises ConfigError if none is installed.
        """
        ...

    def connect_engine(self, engine: Any) -> Any:
        """Return what draws tokens of ``engine`` for sessions in the same process."""
        ...

    def serve_engine(self, engine: Any, tokenizer: Any, data: Any, sampling: Any, **address: Any) -> Any:
        """Serve the engine of a generator to rollout workers in other processes. The result has a ``url``."""
        ...


def find_rollout_worker() -> EntryPoint | None:
    """Return the entry point of the workers that run sessions; None if no package with them is installed.

    Raises:
        ConfigError: Several packages have one.
    """
    return find_installed(_SESSIONS, "rollout", _SESSIONS)


def load_rollout_worker(purpose: str) -> type[Any]:
    """Return the class of the workers that run sessions. Arguments and errors are those of :func:`load_sessions`."""
    return cast("type[Any]", _load(find_rollout_worker(), purpose))


def load_sessions(purpose: str) -> SessionPackage:
    """Return the package that runs sessions.

    Args:
        purpose: What needs it, as the subject of a sentence.

    Raises:
        ConfigError: No installed package does, several do, or it cannot be loaded.
    """
    return cast(SessionPackage, _load(find_installed(_SESSIONS, "sessions", _SESSIONS), purpose))


def _load(entry: EntryPoint | None, purpose: str) -> object:
    if entry is None:
        raise ConfigError(
            f"{purpose} needs a package that runs sessions, and none is installed (docs/environments.md): "
            f"{explain_packages(_SESSIONS, 'sessions')}"
        )
    with explain_raised(f"{purpose} needs {entry.value}, which cannot be loaded"):
        return entry.load()


def find_environments() -> dict[str, EntryPoint]:
    """Return the environments that installed packages bring through the entry point group, by their names."""
    return {entry.name: entry for entry in list_entry_points(group=_GROUP)}


def load_environment(name: str) -> Any:
    """Return the class or function that ``environment.name`` names.

    Raises:
        ConfigError: It does not exist, or its module raised an exception while it was loaded.
    """
    if ":" in name:
        return load_function(name, key=_KEY)
    return load_installed(_entry_of(name), _KEY)


def _entry_of(name: str) -> EntryPoint:
    """Return the installed environment of a name. Raises ConfigError if there is none."""
    environments = find_environments()
    if name not in environments:
        listed = f"installed are {', '.join(sorted(environments))}" if environments else "none is installed"
        raise ConfigError(
            f"{_KEY} = {name!r}: no environment of this name is installed; {listed}"
            f"{nearest(name, environments, _GROUP)}; an environment of your own is path/file.py:{name} or "
            f"module:{name} (docs/environments.md); {explain_packages(_GROUP, name)}"
        )
    return environments[name]


@section("environment.options")
class SessionLimits:
    """Options that every environment has in addition to its own."""

    time_limit_s: float = Field(default=600.0, gt=0, le=1e6)
    """A session lasts at most this many seconds. A longer session is ended and is not trained on."""
    at_once: int = Field(default=256, ge=1, le=65536)
    """Each rollout worker runs at most this many sessions at the same time."""
    processes: int = Field(default=0, ge=0, le=1024)
    """Each session runs in a process of its own. A rollout worker has at most this many such processes at the same
    time. With 0, sessions share the worker's process.
    """
    host: str = Field(default="127.0.0.1", min_length=1)
    """The base_url of sessions is at this address. The default reaches this machine alone, and only processes of this
    user. With another address, such as 0.0.0.0, the keys of sessions alone decide who may ask.
    """
    ports: int | str = 0
    """The base_url of sessions has the first free port of this range, such as 8900-8915, or this port. 0 is any free
    port. Each rollout worker takes a port of its own.
    """

    turn_limit: int = Field(default=0, ge=0)
    """A session ends when the model is asked for more answers than this. 0, here and in the next three, is no limit."""
    sampled_limit: int = Field(default=0, ge=0)
    """A session ends when it has sampled so many tokens. Its last answer is cut off there."""
    read_limit: int = Field(default=0, ge=0)
    """A session ends at the prompt that brings its prompts above this many tokens in all."""
    tool_call_limit: int = Field(default=0, ge=0)
    """Once the model has called tools more often than this, the session ends at its next request."""
    train_at_limit: bool = True
    """What was said in a session that ends by one of these four limits is trained on, with the score 0, as when the
    model's context is full. With false the session is counted as failed.
    """

    def __post_init__(self) -> None:
        _ = self.port_range

    @property
    def budget(self) -> dict[str, int]:
        """What a session may use, by the names of the options that limit it."""
        limits = {name: int(getattr(self, name)) for name in BUDGETS}
        return {name: limit for name, limit in limits.items() if limit}

    @property
    def port_range(self) -> range:
        """The ports, in the order in which they are tried. Raises ConfigError where ``ports`` is no range of ports."""
        text = str(self.ports)
        first, _, last = text.partition("-") if "-" in text else (text, "", text)
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) <= 65535):
            raise ConfigError(
                f"environment.options.ports = {self.ports!r}: expected a port from 0 to 65535, or two of them with a "
                "hyphen, such as 8900-8915"
            )
        return range(int(first), int(last) + 1)

    @property
    def side_by_side(self) -> int:
        """How many sessions a rollout worker lives at the same time."""
        return min(self.at_once, self.processes or self.at_once)


@section("environment")
class EnvironmentConfig:
    """The environment in which the policy acts, if a task is more than one prompt and one answer."""

    name: str = ""
    """The policy acts in this environment: module:function, path/file.py:function or the name of an installed one. An
    empty name means that each prompt is answered once."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """The environment gets these options. Every environment also has the options time_limit_s, at_once and processes,
    turn_limit, sampled_limit, read_limit, tool_call_limit and train_at_limit, which limit its sessions, and host and
    ports, where agents ask for the model.
    """

    def __post_init__(self) -> None:
        if self.name:
            _ = self.limits
            if ":" in self.name:
                check_function_name(self.name, key=_KEY)
            else:
                _entry_of(self.name)

    @property
    def shown(self) -> str:
        """The setting as an error names it."""
        return f"{_KEY} = {self.name!r}"

    @property
    def code(self) -> str:
        """Where the code of the environment is, as ``module:function`` or ``path/file.py:function``. "" without one."""
        if ":" in self.name or not self.name:
            return self.name
        entry = _entry_of(self.name)
        return f"{entry.module}:{entry.attr}"

    @property
    def limits(self) -> SessionLimits:
        """The limits of its sessions. Raises ConfigError for one that is wrong."""
        names = SessionLimits.__dataclass_fields__
        options = {name: value for name, value in self.options.items() if name in names}
        return build_config(SessionLimits, options, key="environment.options")

    @property
    def own_options(self) -> dict[str, Any]:
        """The options of the environment itself."""
        names = SessionLimits.__dataclass_fields__
        return {name: value for name, value in self.options.items() if name not in names}
