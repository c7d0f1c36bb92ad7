"""Record chosen calls of chosen ranks with torch.profiler."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.functions import nearest
from podium.spelling import write_count


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Which calls of a group torch.profiler records: ``cluster.start(..., profile=Profile(calls=["update"]))``.

    Attributes:
        calls: Names of the endpoints, or "role.endpoint" for one of several colocated workers.
        ranks: Ranks that record.
        skip: Number of calls of each endpoint before the first that is recorded.
        count: Number of calls of each endpoint to record.
        directory: Directory in which each recorded call writes a Chrome trace, ``ROLE-RANK-METHOD-NUMBER.json``, on the
            worker's node. The number counts the calls of the endpoint from 0.
        options: Arguments of ``torch.profiler.profile``, such as ``{"with_stack": True}``.
    """

    calls: Sequence[str]
    ranks: Sequence[int] = (0,)
    skip: int = 1
    count: int = 1
    directory: str | Path = "profile"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def check(self, endpoints: Sequence[str], ranks: int) -> None:
        """Raise a ConfigError for a call that is no endpoint, or a rank that the group does not have."""
        if isinstance(self.calls, str) or not self.calls:
            raise ConfigError(f"Profile(calls={self.calls!r}): expected a list of endpoints, as in ['update']")
        for name in self.calls:
            if name not in endpoints:
                raise ConfigError(f"Profile(calls=...): {name!r} is no endpoint here{nearest(name, endpoints)}")
        if odd := [rank for rank in self.ranks if rank not in range(ranks)]:
            raise ConfigError(
                f"Profile(ranks={[*self.ranks]}): the group has {write_count(ranks, 'rank')}, and no rank {odd[0]}"
            )
        if self.skip < 0 or self.count < 1:
            raise ConfigError(f"Profile(skip={self.skip}, count={self.count}): skip is 0 or more, count 1 or more")


class Recorded:
    """A method some of whose calls are recorded. ``label`` begins the names of the files."""

    def __init__(self, method: Callable[..., Any], profile: Profile, label: str) -> None:
        self._method, self._profile, self._label = method, profile, label
        self._calls = 0

    def __call__(self, **values: Any) -> Any:
        number, self._calls = self._calls, self._calls + 1
        if not self._profile.skip <= number < self._profile.skip + self._profile.count:
            return self._method(**values)
        path = Path(self._profile.directory) / f"{self._label}-{number}.json"
        if inspect.iscoroutinefunction(self._method):
            return self._await_and_record(path, values)
        with self._recording(path):
            return self._method(**values)

    async def _await_and_record(self, path: Path, values: Mapping[str, Any]) -> Any:
        with self._recording(path):
            return await self._method(**values)

    def _recording(self, path: Path) -> Any:
        from torch.profiler import profile

        def save(recorded: Any) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))

        return profile(on_trace_ready=save, **self._profile.options)
