"""Several scripts on one Ray cluster: who holds what, what is left of one that ends, groups that outlive theirs."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import podium
from podium import Cluster
from podium.errors import ConfigError, PlacementError, WorkerDied
from tests.integration.processes import alive, run_script, start_script
from tests.integration.ray_workers import Busy, attach_and_ask
from tests.waits import LONG_S, all_end, wait_until

if TYPE_CHECKING:
    from tests.integration.ray_nodes import Head

pytestmark = pytest.mark.ray

ROOT = str(Path(__file__).parents[2])
START = """
import os, sys, time
import podium, podium.errors
from podium import Worker
from tests.integration.ray_workers import Busy
"""


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    from tests.integration.ray_nodes import ray_head

    with tempfile.TemporaryDirectory(prefix="ray") as directory, ray_head(Path(directory)) as head:
        yield head


@pytest.fixture(scope="module")
def cluster(head: Head) -> Iterator[Cluster]:
    with podium.connect("ray", address=head.address, preload=()) as cluster:
        yield cluster


@contextmanager
def script(directory: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    """A script that runs until the block ends, if it does not end before."""
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # Ray's sockets have no room for pytest's long paths
        running = start_script(directory, START + text, PYTHONPATH=ROOT, RAY_TMPDIR=short)
        try:
            yield running
        finally:
            running.kill()
            running.communicate()


def line(running: subprocess.Popen[str], directory: Path) -> str:
    """The next line that it prints."""
    assert running.stdout is not None
    said = running.stdout.readline()
    assert said, (directory / "stderr").read_text()
    return said.strip()


def holding(head: Head, more: str = "") -> str:
    """A script that holds three of four CPUs, one of them without a group, says the ids of its workers, and stays."""
    return f"""
cluster = podium.connect("ray", address={head.address!r}, preload=())
busy = cluster.start(Busy.bind(), cluster.pool([2], cpus=1), name="theirs", distributed=False)
idle = cluster.pool([1], cpus=1)
{more}
print(*busy.group.pids, *busy.child(), flush=True)
time.sleep(600)
"""


# -- placement -------------------------------------------------------------------------------------------------------


def test_a_pool_that_cannot_be_had_says_who_holds_what(
    cluster: Cluster, head: Head, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr("podium.runtime.cluster.WAIT_SAYS_S", 0.0)

    with script(tmp_path, holding(head)) as other:
        line(other, tmp_path)
        actor: Any = ray.remote(num_cpus=0.5)(Plain).remote()
        ray.get(actor.ready.remote())
        mine = cluster.pool([1], cpus=0.25)
        group = cluster.start(Busy.bind(), mine, name="mine", distributed=False)
        with caplog.at_level(logging.WARNING, "podium"), pytest.raises(PlacementError) as caught:
            cluster.pool([2], cpus=1)
        assert "waiting up to" not in caplog.text
        for said in (
            "asked for 2 cpu on 1 node",
            "0.25 cpu free on",
            f"podium:script.py:{other.pid} (3)",
            "other Ray tasks and actors (0.5)",
            "mine (0.25)",
        ):
            assert said in str(caught.value)
        group.group.close()
        cluster.release(mine)
        ray.kill(actor)


class Plain:
    """An actor that is not Podium's."""

    def ready(self) -> None:
        """It runs."""


def test_a_pool_is_waited_for_aloud_and_a_killed_script_gives_everything_back(
    cluster: Cluster, head: Head, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.integration.ray_nodes import groups_held

    monkeypatch.setattr("podium.runtime.cluster.WAIT_SAYS_S", 0.0)
    with script(tmp_path, holding(head)) as other:
        pids = [int(pid) for pid in line(other, tmp_path).split()]
        with caplog.at_level(logging.WARNING, "podium"), pytest.raises(PlacementError, match="3 cpu on 1 node"):
            cluster.pool([3], cpus=1, wait_s=1.2)
        said = [record.getMessage() for record in caplog.records]
        assert said
        assert all("waiting up to" in each and f"podium:script.py:{other.pid} (3)" in each for each in said)
        other.kill()
        other.wait()
        pool = cluster.pool([4], cpus=1, wait_s=LONG_S)
        assert all_end(pids), "its workers and their children"
        assert len(groups_held()) == 1, "ours"
        cluster.release(pool)
        assert groups_held() == []


def test_a_script_that_ends_leaves_nothing(cluster: Cluster, head: Head, tmp_path: Path) -> None:
    from tests.integration.ray_nodes import groups_held

    out = run_script(tmp_path, START + holding(head).replace("time.sleep(600)", ""), PYTHONPATH=ROOT)
    assert all_end(map(int, out.split()))
    assert wait_until(lambda: groups_held() == []), groups_held()
    cluster.release(cluster.pool([4], cpus=1))


# -- ways to connect -------------------------------------------------------------------------------------------------

JOINED = """
import ray
ray.init(address={address!r}, log_to_driver=False)

@ray.remote(num_cpus=0)
class Plain:
    def ready(self):
        return True

plain = Plain.remote()
first = podium.connect("ray", preload=())
with podium.connect("ray", preload=()) as second:
    busy = second.start(Busy.bind(), name="second", distributed=False)
    pids = busy.group.pids
    held = first.start(Busy.bind(), first.pool([1], cpus=1), distributed=False)
print(held.ping(1), ray.is_initialized(), ray.get(plain.ready.remote()))
first.close()
print(ray.is_initialized(), ray.get(plain.ready.remote()), *pids)
"""


def test_a_ray_that_was_there_before_is_joined_and_left_running(head: Head, tmp_path: Path) -> None:
    out = run_script(tmp_path, START + JOINED.format(address=head.address), PYTHONPATH=ROOT)
    first, second = out.splitlines()
    assert first == "[1] True True"
    assert second.startswith("True True ")
    assert all_end([int(second.split()[2])])


FOUND = """
import signal
import torch
signal.signal(signal.SIGTERM, lambda number, frame: None)
mine = signal.getsignal(signal.SIGTERM)
with podium.HOW as cluster:
    assert signal.getsignal(signal.SIGTERM) is mine, "Ray has put its own handler there"
    pool = cluster.pool([2], cpus=1)
    busy = cluster.start(Busy.bind(), pool, distributed=False)
    print(busy.ping(7), sorted(busy.echo(bytearray(1 << 20))[:2]))
    put = [cluster.put(torch.full((50_000,), at)) for at in range(2)]
    print([int(busy.echo(ref).sum()) for ref in put])
    try:
        cluster.pool([3], cpus=1)
    except podium.errors.PlacementError as error:
        print("held by: busy (2)" in str(error))
    os.environ.pop("RAY_ADDRESS", None)
    busy.group.restart()
    print(busy.ping(8))
    try:
        busy.raise_on(1)
    except podium.errors.EndpointError as error:
        print(type(error.__cause__).__name__)
"""


@pytest.mark.parametrize("way", ["auto", "client"])
def test_a_running_cluster_is_found(head: Head, tmp_path: Path, way: str) -> None:
    """By RAY_ADDRESS, and through Ray's client, where even the inventory is asked for remotely."""
    how = 'connect("ray", address="auto", preload=())' if way == "auto" else f"connect({head.client!r}, preload=())"
    try:
        out = run_script(tmp_path, START + FOUND.replace("HOW", how), PYTHONPATH=ROOT, RAY_ADDRESS=head.address)
    except AssertionError as error:
        if way == "client" and (why := head.why_no_client()):
            pytest.skip(why)
        error.add_note(head.client_logs())
        raise
    assert out.splitlines() == ["[7, 7] [0, 0]", "[0, 50000]", "True", "[8, 8]", "LookupError"]


@pytest.mark.parametrize("failures", [2, 3])
def test_a_server_for_a_client_that_did_not_start_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Three times in all; then the error says where Ray's log is."""
    from podium_ray import backend

    asked: list[Any] = []

    def init(**how: Any) -> None:
        asked.append(how["address"])
        if len(asked) <= failures:
            raise ConnectionAbortedError("RuntimeError: Starting Ray client server failed. See ray_client_server_1.err")
        raise ValueError("now it was there")

    monkeypatch.setattr(backend.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(backend.ray, "init", init)
    said = "now it was there" if failures < 3 else r"ray_client_server_1\.err; .*session_latest/logs"
    with pytest.raises(ConfigError, match=said):
        podium.connect("ray://head", preload=())
    assert asked == ["ray://head"] * 3


def test_an_address_where_nothing_runs_is_named(tmp_path: Path) -> None:
    out = run_script(
        tmp_path,
        """
import podium, podium.errors
for way in ("127.0.0.1:1", "ray://127.0.0.1:1"):
    try:
        podium.connect("ray", address=way)
    except podium.errors.ConfigError as error:
        print(error)
""",
    )
    for way, said in zip(("127.0.0.1:1", "ray://127.0.0.1:1"), out.splitlines(), strict=True):
        assert f"address '{way}' cannot be had: " in said
        assert "refused" in said


EMBEDDED = """
from pathlib import Path
from tests.integration.processes import listeners_of, opened_by_others
from tests.integration.ray_workers import devices_of
for name in [name for name in os.environ if name.startswith("RAY_AUTH")]:
    del os.environ[name]
os.environ["CUDA_VISIBLE_DEVICES"] = "4,5"
os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
home = Path(os.environ["RAY_TMPDIR"])
home.chmod(0o755)
(home / "public").touch(0o644)
os.environ["HOME"] = str(home)
with podium.connect("ray", preload=(), init={"num_cpus": 2, "num_gpus": 2}) as cluster:
    for pool in (cluster.pool([2], gpus=1), cluster.pool([1]), cluster.pool([1], cpus=1)):
        print(sorted(cluster.start(Worker.bind(), pool, distributed=False).group.run(devices_of)), flush=True)
    busy = cluster.start(Busy.bind(), cluster.pool([2]), distributed=True)
    import ray
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    token = home / ".ray" / "auth_token"
    within = [*session.iterdir(), *session.glob("sockets/*"), *session.glob("logs/*")]
    print(*listeners_of(os.getpid()))
    print(oct(token.stat().st_mode)[-3:], len(token.read_text()))
    print(opened_by_others(home / "public", session, *within, token) if os.geteuid() == 0 else None)
    pids = [*busy.group.pids, *busy.child()]
print(session, *pids, flush=True)
time.sleep(600)
"""


class Embedded(NamedTuple):
    """What a script saw of its embedded cluster, and what was left when it had closed the cluster.

    Attributes:
        devices: What workers of three pools saw: with an accelerator each, without resources, with a core.
        listeners: The addresses on which the script and its descendants listened.
        token: Mode and length of the file with Ray's token.
        opened: What another user could open of a public file, Ray's session and the token. Only root can ask.
        left: The files and processes that were left.
    """

    devices: list[str]
    listeners: str
    token: str
    opened: str
    left: list[str]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    directory = tmp_path_factory.mktemp("embedded")
    with script(directory, EMBEDDED) as running:
        *devices, listeners, token, opened, last = (line(running, directory) for _ in range(7))
        session, *pids = last.split()
        kept = (Path(session).parents[2], {"public", ".ray"})
        yield Embedded(devices, listeners, token, opened, left_of(session, pids, running.pid, directory, kept))


def left_of(
    session: str, pids: Sequence[str], script_pid: int, directory: Path, kept: tuple[Path, set[str]]
) -> list[str]:
    """Return what does not go within a minute: workers with their children, Ray's agents, its files, and workers' logs.

    ``kept`` is Ray's directory and the names of what stays there.
    """
    from tests.integration.ray_nodes import session_processes

    def rest() -> list[str]:
        processes = set(session_processes(session)) - {script_pid}
        return [*map(str, processes), *(set(os.listdir(kept[0])) - kept[1]), *os.listdir(directory / "tmp")]

    numbers = [int(pid) for pid in pids]
    if all_end(numbers) and wait_until(lambda: not rest()):
        return []
    return [*(str(pid) for pid in numbers if alive(pid)), *rest()]


def test_an_embedded_cluster_that_is_closed_leaves_nothing(embedded: Embedded) -> None:
    assert not embedded.left


def test_an_embedded_cluster_is_its_users_alone(embedded: Embedded) -> None:
    """It listens on loopback. Another user opens neither its directory nor its token."""
    assert {*embedded.listeners.split()} == {"127.0.0.1"}
    assert embedded.token == "600 64"
    if embedded.opened == "None":
        pytest.skip("only root can try this as another user")
    assert re.fullmatch(r"\['/[^',]*/public'\]", embedded.opened)


def test_accelerators_that_the_script_may_use_are_dealt_and_no_others(embedded: Embedded) -> None:
    """Where Ray leaves the variable alone, too; slots that ask for none see none."""
    assert embedded.devices == ["[((0,), '4'), ((0,), '5')]", "[((), '')]", "[((), '')]"]


def test_an_embedded_cluster_ends_with_a_script_that_is_killed(tmp_path: Path) -> None:
    from tests.integration.ray_nodes import session_processes

    text = """
cluster = podium.connect("ray", preload=())
busy = cluster.start(Busy.bind(), cluster.pool([2], cpus=0.5), distributed=False)
import ray
print(ray._private.worker._global_node.get_session_dir_path(), *busy.group.pids, *busy.child(), flush=True)
time.sleep(600)
"""
    with script(tmp_path, text) as running:
        session, *pids = line(running, tmp_path).split()
        assert len(session_processes(session)) > 3, "they are found where there are some"
        running.kill()
        running.wait()
        assert not left_of(session, pids, running.pid, tmp_path, (Path(session).parents[2], set()))


def test_a_ray_that_cannot_start_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from podium_ray import connect

    def init(**how: Any) -> None:
        raise Exception("The current node timed out during startup.\nThe raylet said:\n" + "a line\n" * 40)

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(connect.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connect.ray, "init", init)
    with pytest.raises(ConfigError) as caught:
        podium.connect("ray", preload=())
    said = r"connect\('ray'\): an embedded cluster cannot be had: The current node timed out during startup\. "
    assert re.fullmatch(rf"{said}\(Ray's logs: {tmp_path}/podium-\w+/ray\)", str(caught.value))


# -- detached groups -------------------------------------------------------------------------------------------------

DETACHED = """
cluster = podium.connect("ray", address={address!r}, preload=())
pool = cluster.pool([2], cpus=1, detached=True)
busy = cluster.start(Busy.bind(), pool, name={name!r}, detached=True, distributed=False)
ends = cluster.start(Busy.bind(), distributed=False)
print(*busy.group.pids, *ends.group.pids, flush=True)
{then}
"""


@pytest.mark.parametrize("ending", ["exit", "kill"])
def test_a_detached_group_outlives_its_script(cluster: Cluster, head: Head, tmp_path: Path, ending: str) -> None:
    import ray

    from tests.integration.ray_nodes import groups_held

    name = f"kept_{ending}"
    text = DETACHED.format(address=head.address, name=name, then="time.sleep(600)" if ending == "kill" else "")
    with script(tmp_path, text) as starter:
        *pids, ends = (int(pid) for pid in line(starter, tmp_path).split())
        if ending == "kill":
            starter.kill()
        starter.wait(LONG_S)
    assert all_end([ends]), "its other group ends with it"
    kept = cluster.attach(name)
    assert list(kept.group.pids) == pids
    assert kept.ping(1) == [1, 1]
    with pytest.raises(ConfigError, match=r"belongs to another controller.*cluster\.stop"):
        kept.group.restart()
    task: Any = ray.remote(num_cpus=0)(attach_and_ask)
    assert ray.get(task.remote(name)) == [2, 2], "from inside a Ray task too"
    kept.group.close()
    assert cluster.attach(name).echo("still here") == "still here"
    with pytest.raises(PlacementError, match=f"podium:script.py:{starter.pid} \\(2\\)"):
        cluster.pool([3], cpus=1)
    cluster.stop(name)
    assert all_end(pids)
    assert groups_held() == []
    cluster.release(cluster.pool([4], cpus=1))
    with pytest.raises(ConfigError, match=f"no detached group '{name}'"):
        cluster.attach(name)


def test_the_death_of_a_detached_worker_is_seen_by_who_attached(cluster: Cluster, head: Head, tmp_path: Path) -> None:
    with script(tmp_path, DETACHED.format(address=head.address, name="mortal", then="")) as starter:
        *pids, _ = (int(pid) for pid in line(starter, tmp_path).split())
        starter.wait(LONG_S)
    kept = cluster.attach("mortal")
    call = kept.wait.submit()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="rank 1 of mortal") as caught:
        call.result(60.0)
    assert caught.value.rank == 1
    assert alive(pids[0])
    cluster.stop("mortal")
    assert all_end(pids)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_left_of_a_detached_group_can_be_stopped(cluster: Cluster, rank: int) -> None:
    from tests.integration.ray_nodes import groups_held

    pool = cluster.pool([2], cpus=1, detached=True)
    torn = cluster.start(Busy.bind(), pool, name="torn", detached=True, distributed=False)
    pids = torn.group.pids
    os.kill(pids[rank], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        torn.wait()
    with pytest.raises(ConfigError, match=r"'torn' has lost 1 of its 2 ranks; end it with cluster\.stop\('torn'\)"):
        cluster.attach("torn")
    with pytest.raises(ConfigError, match="torn"):
        cluster.start(Busy.bind(), cluster.pool([2]), name="torn", detached=True, distributed=False)
    cluster.stop("torn")
    assert all_end(pids)
    assert wait_until(lambda: groups_held() == [])
    with pytest.raises(ConfigError, match="no detached group 'torn'"):
        cluster.attach("torn")


def test_a_name_is_taken_once_and_unknown_ones_are_refused(cluster: Cluster) -> None:
    for ask in (cluster.attach, cluster.stop):
        with pytest.raises(ConfigError, match="no detached group 'nobody'"):
            ask("nobody")
    first = cluster.start(Busy.bind(), name="once", detached=True, distributed=False)
    first.group.close()
    with pytest.raises(ConfigError, match="once"):
        cluster.start(Busy.bind(), name="once", detached=True, distributed=False)
    assert cluster.attach("once").ping(3) == [3]
    cluster.stop("once")
