"""The placement of a run's roles: checks, shared accelerators, and the line that describes the placement.

    2 accelerators, 5 processes     process       0  1  2  3  4
                                    accelerator   0  1  0  1  0     the processes 0, 2 and 4 hold a third each

Process number ``i`` uses accelerator ``i`` modulo the number of accelerators, counted node by node. So two ranks of one
role share an accelerator only if the role has more ranks than there are accelerators.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, TypeVar, cast

from podium.errors import ConfigError, PlacementError
from podium.runs.config import InferenceConfig, PPOConfig, SFTConfig
from podium.runs.sections import PlacementConfig
from podium.runtime import Capabilities, Cluster, Node, ResourcePool, Worker
from podium.runtime.pool import Slot
from podium.spelling import write_count

T = TypeVar("T")

_logger = logging.getLogger(__name__)

_WITHOUT_COLLECTIVES: Final = frozenset({"generator", "reward", "estimator", "rollout"})
_TRAINING: Final = frozenset({"policy", "critic", "reference", "teacher"})
_BFLOAT16: Final = "bfloat16"
_OWN_ENGINES: Final = frozenset({"native", "transformers", "auto"})
_LEAST_WIDTH: Final = 256  # of a model whose products take most of the time of generation
_WORTH: Final = 0.8  # of float32's time, below which bfloat16 is worth a word


def check_placement(config: PPOConfig | SFTConfig, backend: str, can: Capabilities, nodes: Sequence[Node] = ()) -> None:
    """Check that a backend called ``backend`` can hold the worker processes, on ``nodes`` if these are known.

    Raises:
        ConfigError: The backend has no collectives over several ranks, its nodes have too few cores, or sessions have
            too few ports.
    """
    placement, processes = config.placement, sum(count for _, count in config.processes)
    for roles, ranks in config.processes:
        if ranks > 1 and not can.collectives and not {*roles} <= _WITHOUT_COLLECTIVES:
            raise ConfigError(
                f"{placement.key_of(roles[0])} = {ranks}: {backend} has no collectives over several ranks; set it to "
                "1, or use the backend local"
            )
    if len(nodes) == 1:
        check_ports(config, max((count for roles, count in config.processes if "rollout" in roles), default=0))
    cores = [int(node.resources.get("cpu", 0)) for node in nodes]
    if nodes and placement.cpus and sum(count // placement.cpus for count in cores) < processes:
        raise ConfigError(
            f"placement.cpus = {placement.cpus}: {write_count(processes, 'worker process', 'worker processes')} of so "
            f"many cores {'does' if processes == 1 else 'do'} not fit into {' + '.join(map(str, cores))} cores; "
            "lower it, or leave it out for an equal share"
        )


def check_ports(config: InferenceConfig, workers: int) -> None:
    """Check that each of the rollout ``workers`` of a node has a port of its own. Raises ConfigError if not."""
    ports = config.environment.limits.port_range
    if 0 in ports or len(ports) >= workers:
        return
    first, named = ports[0], config.environment.limits.ports
    raise ConfigError(
        f"environment.options.ports = {named!r} has {write_count(len(ports), 'port')}, and {workers} rollout "
        f"workers on one machine need a port each: set it to a range of {workers}, such as "
        f"{first}-{first + workers - 1}, or to 0 for any free ports"
    )


# -- shared accelerators ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sharing:
    """How worker processes share accelerators.

    Attributes:
        loads: For each node that has accelerators, the number of processes on each of these.
    """

    loads: tuple[tuple[int, ...], ...]

    @property
    def slots(self) -> list[int]:
        """Number of processes on each node."""
        return [sum(node) for node in self.loads]

    @property
    def gpus(self) -> list[float]:
        """The share of each slot, node by node. The slots of one accelerator are next to each other."""
        return [1 / load for node in self.loads for load in node for _ in range(load)]

    def interleave(self, slots: Sequence[T]) -> list[T]:
        """Reorder the entries that belong to ``gpus`` for the processes: first one of each accelerator, then a second
        one of each."""
        turns = [turn for node in self.loads for load in node for turn in range(load)]
        return [slots[at] for at in sorted(range(len(turns)), key=turns.__getitem__)]


def sharing(nodes: Sequence[Node], processes: int) -> Sharing | None:
    """Return how ``processes`` share the accelerators of ``nodes``; None if they need not share, or if there are no
    accelerators."""
    counts = [int(node.resources.get("gpu", 0)) for node in nodes]
    total = sum(counts)
    if not 0 < total < processes:
        return None
    share, more = divmod(processes, total)
    loads = iter([share + (number < more) for number in range(total)])
    return Sharing(tuple(tuple(next(loads) for _ in range(count)) for count in counts if count))


@contextmanager
def reserve_places(cluster: Cluster, processes: int, placement: PlacementConfig) -> Iterator[ResourcePool]:
    """Yield a slot for each worker process, which is released after the block. A slot has the configured cores, and, if
    the cluster has accelerators, one of them or an equal share of one.

    Raises:
        PlacementError: There is no room. The message names the keys.
    """
    shares, how = sharing(cluster.nodes, processes), {"cpus": placement.cpus or 0, "wait_s": placement.wait_s}
    try:
        if shares is not None:
            pool = ResourcePool(shares.interleave([*cluster.pool(shares.slots, gpus=shares.gpus, **how)]))
        else:
            gpus = int(any(node.resources.get("gpu", 0) >= 1 for node in cluster.nodes))
            pool = cluster.pool(spread=processes, gpus=gpus, **how)
    except PlacementError as error:
        keys = "pools" if placement.pools else "ranks"
        raise PlacementError(
            f"placement of {write_count(processes, 'rank')} (placement.{keys}, placement.cpus): {error}"
        ) from error
    try:
        yield pool
    finally:
        cluster.release(pool)


# -- what a run says of its places -----------------------------------------------------------------------------------


def describe_placement(parts: Iterable[tuple[Sequence[str], Sequence[Slot]]]) -> str:
    """Describe the placement of roles in one line. ``parts`` are the roles that share processes, and their slots."""
    parts = [*parts]
    named = len({slot.node for _, slots in parts for slot in slots}) > 1
    sentences = [
        f"{', '.join(roles)}: {write_count(len(slots), 'process')} on {_describe_devices(slots, named=named)}"
        for roles, slots in parts
    ]
    return f"placement  {'; '.join(sentences)}"


def _describe_devices(slots: Sequence[Slot], *, named: bool) -> str:
    """Return the devices of slots: "gpu 0-3" or "cpu", with their nodes if ``named``, and with the number of processes
    that share them."""
    devices: dict[str, set[int]] = {}
    for slot in slots:
        devices.setdefault(slot.node, set()).update(slot.devices)
    places = [
        f"{node} " * named + (f"gpu {_ranges(node_devices)}" if node_devices else "cpu")
        for node, node_devices in devices.items()
    ]
    loads = {round(1 / slot.resources["gpu"]) for slot in slots if 0 < slot.resources.get("gpu", 0) <= 1}
    most = max(loads, default=1)
    shared = f" (shared by {'up to ' * (len(loads) > 1)}{most})" if most > 1 else ""
    return (", ".join(places) or "cpu") + shared


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, such as "0-3, 6"."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(sorted(numbers)), lambda at: at[1] - at[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def bfloat16_keys(config: InferenceConfig, roles: Sequence[str]) -> list[str]:
    """Return the keys that make processes with these roles compute in bfloat16 on a CPU, which is not the default."""
    generates, trains = "generator" in roles, bool(_TRAINING & {*roles})
    parallel = config.parallel if isinstance(config, PPOConfig | SFTConfig) else None
    roles_by_device = {
        "model.dtype": config.model.dtype == _BFLOAT16 and (trains or (generates and config.engine.dtype is None)),
        "parallel.precision": trains and parallel is not None and parallel.choice.compute == _BFLOAT16,
        "engine.dtype": generates and config.engine.dtype == _BFLOAT16,
    }
    return [key for key, asks in roles_by_device.items() if asks]


def warn_of_bfloat16(config: InferenceConfig, started: Mapping[tuple[str, ...], Sequence[Any]]) -> None:
    """Say in one line which keys ask for bfloat16 on processors that have no instructions for it.

    Args:
        started: A handle of each set of worker processes, by the roles that share these.
    """
    keys: dict[str, None] = {}
    has: dict[str, bool] = {}  # by node, whether its processor has instructions
    for roles, handles in started.items():
        asking = bfloat16_keys(config, roles)
        for group in (handle.group for handle in handles if asking):
            for rank, node in ((rank, slot.node) for rank, slot in enumerate(group.processes.pool) if not slot.devices):
                if node not in has:
                    has[node] = group.run_on(rank, _has_bfloat16)
                keys |= {} if has[node] else dict.fromkeys(asking)
    if keys:
        _logger.warning(
            "%s = bfloat16 on the CPU of %s, which has no instructions for bfloat16 (avx512_bf16, amx_bf16): matrix "
            "products and generation are many times slower than in float32",
            ", ".join(keys),
            ", ".join(node for node, node_devices in has.items() if not node_devices),
        )


def suggest_bfloat16(config: InferenceConfig, generator: Any) -> None:
    """Say in one line what bfloat16 would save where a generator computes in float32 beside a unit for bfloat16.

    Args:
        generator: The handle of the generator; None where there is none.
    """
    wide = config.engine.dtype is None and config.model.dtype == "float32" and config.engine.name in _OWN_ENGINES
    if generator is None or not wide or any(slot.devices for slot in generator.group.processes.pool):
        return
    hidden, inner = generator.group.run_on(0, _widths)
    if min(hidden, inner) < _LEAST_WIDTH:
        return
    milliseconds = generator.group.run_on(0, _time_dtypes, hidden, 2 * inner)
    if milliseconds is not None and milliseconds[1] < _WORTH * milliseconds[0]:
        _logger.warning(
            "engine.dtype: bfloat16 would speed up generation: this processor has a unit for it (AMX), and 16 rows "
            "take %.2f ms with a layer's matrix in place of %.2f. The log-probability of a sampled token then "
            "differs from training's, by 0.03 to 0.07 on average with SmolLM2-135M (docs/training.md)",
            *reversed(milliseconds),
        )


def _widths(worker: Worker) -> tuple[int, int]:
    from podium.models.loading import layer_widths

    return layer_widths(cast(Any, worker).config)


def _time_dtypes(worker: Worker, terms: int, columns: int) -> tuple[float, float] | None:
    """The milliseconds of a product in float32 and bfloat16; None where the processor has no unit for the latter."""
    import torch

    from podium.devices import has_bfloat16_unit, time_matmuls

    del worker
    if not has_bfloat16_unit():
        return None
    return time_matmuls(terms, columns, torch.float32), time_matmuls(terms, columns, torch.bfloat16)


def _has_bfloat16(worker: Worker) -> bool:
    """Whether the processor of a worker has instructions for bfloat16."""
    from podium.devices import has_bfloat16

    del worker
    return has_bfloat16()
