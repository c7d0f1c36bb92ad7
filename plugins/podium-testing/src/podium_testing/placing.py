"""Contract: pools and slots, meshes, the worker's context, colocation, names."""

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from podium.errors import CallCancelled, ConfigError, EndpointError, PlacementError, WorkerDied, WorkerStartError
from podium.runtime import Cluster, Colocated, Handle, Mesh, Profile, Worker, colocate, endpoint
from podium.telemetry import WorkerLost, WorkerStarted, subscribe
from podium_testing.load_workers import read_environment
from podium_testing.shipped import (
    CamelCaseName,
    Fails,
    Heir,
    change_rank,
    coordinate_in,
    listen,
    listen_to_records,
    reach,
)
from podium_testing.target import Target, need, refuses
from podium_testing.workers import Counter, Framework, Keeper, Place, RaisesOn, Sleeper

__all__ = ["PlacingContract"]


class PlacingContract:
    def test_a_pool_is_an_ordered_sequence_of_slots(self, cluster: Cluster) -> None:
        pool = cluster.pool([4])
        assert len(pool) == 4
        assert len(pool[1:3]) == 2
        assert pool[1:3][0] is pool[1]
        single, three = pool.split([1, 3])
        assert [*single, *three] == list(pool)
        assert list(three + single) == [*three, *single]
        for wrong in ([1, 2], [0, 4], [5], [-1, 5]):
            refuses(ConfigError, re.escape(f"split({wrong})"), pool.split, wrong)
        cluster.release(pool)

    def test_sizes_may_be_single_numbers(self, cluster: Cluster) -> None:
        two: Any = np.int64(2)
        four = cluster.pool(4)
        assert len(four) == len(cluster.pool(spread=two)) * 2 == len(cluster.pool([two, two][:1])) * 2 == 4
        assert [list(part) for part in four.split(two)] == [list(four[0:2]), list(four[2:4])]
        for wrong in (3, 0, -1):
            refuses(
                ConfigError, rf"split\({wrong}\): a size from 1 up that divides the pool's 4 slots", four.split, wrong
            )
        refuses(ConfigError, "from 1 up", cluster.pool, 0)
        replicas = cluster.start_replicas(Counter.bind(1), 1, slots=2, name="pairs", distributed=False)
        assert [replica.add(1) for replica in replicas] == [[2, 2]]
        replicas.close()

    def test_joined_pools_are_released_together_or_not_at_all(self, cluster: Cluster) -> None:
        free, used = cluster.pool([1]), cluster.pool([1])
        holder = cluster.start(Counter.bind(), used, name="one_holder", distributed=False)
        refuses(PlacementError, r"cannot release.*\['one_holder'\]", cluster.release, free + used)
        assert cluster.start(Counter.bind(2), free, distributed=False).add(0) == [2], "the free part is still there"
        holder.group.close()

    def test_groups_run_on_parts_of_a_pool_and_share_it(self, cluster: Cluster) -> None:
        pool = cluster.pool([3])
        left, right = pool.split([1, 2])
        parts = (left, right, right, right + left)
        counters = [cluster.start(Counter.bind(at), part, distributed=False) for at, part in enumerate(parts)]
        assert [counter.add(0) for counter in counters] == [[0], [1, 1], [2, 2], [3, 3, 3]]
        assert len({counter.group.name for counter in counters}) == 4
        counters[1].add(5)
        assert counters[2].add(0) == [2, 2], "groups on one pool share nothing but its resources"

    def test_what_cannot_be_placed_is_refused_at_once_and_says_why(self, cluster: Cluster) -> None:
        node, cores = cluster.nodes[0].name, cluster.nodes[0].resources["cpu"]
        pool = cluster.pool([1], cpus=cores)
        says = rf"asked for 1 cpu on 1 node; 0 cpu free on {node}.*held by: .*a pool without a group \({cores:g}\)"
        refuses(PlacementError, says, cluster.pool, [1], cpus=1)
        holder = cluster.start(Counter.bind(), pool, name="holder", distributed=False)
        refuses(PlacementError, r"held by:.*holder", cluster.pool, [1], cpus=1)
        refuses(PlacementError, r"cannot release.*holder", cluster.release, pool)
        holder.group.close()
        cluster.release(pool)
        cluster.release(cluster.pool([1], cpus=cores))
        more_nodes = len(cluster.nodes) + 1
        for slots, request, says in (
            ([1], {"cpus": cores + 1}, f"asked for {cores + 1:g} cpu on 1 node"),
            ([1] * more_nodes, {}, f"on {more_nodes} nodes"),
            ([1], {"resources": {"unobtainium": 1}}, "unobtainium"),
        ):
            refuses(PlacementError, says, cluster.pool, slots, **request)

    @pytest.mark.parametrize("wrong", [[], [0], [-1, 2]], ids=str)
    def test_a_pool_has_at_least_one_slot_a_node(self, cluster: Cluster, wrong: list[int]) -> None:
        refuses(ConfigError, "from 1 up", cluster.pool, wrong)
        refuses(ConfigError, "from 0 up", cluster.pool, [1], cpus=-1)

    def test_a_pool_spreads_over_whichever_nodes_have_room(self, cluster: Cluster) -> None:
        nodes = cluster.nodes
        cores = min(node.resources["cpu"] for node in nodes)
        held = cluster.pool([1] * len(nodes), cpus=cores / 2)
        pool = cluster.pool(spread=len(nodes), cpus=cores / 2)
        assert len(pool) == len(nodes)
        with pytest.raises(PlacementError, match=rf"asked for {len(nodes)} slots? of .* cpu each, on any nodes"):
            cluster.pool(spread=len(nodes), cpus=max(node.resources["cpu"] for node in nodes), wait_s=0.3)
        cluster.release(pool)
        threading.Timer(0.3, cluster.release, (held,)).start()
        cluster.release(cluster.pool(spread=len(nodes), cpus=cores, wait_s=30.0))
        refuses(ConfigError, r"pool\(\[1\], spread=1\)", cluster.pool, [1], spread=1)

    def test_slots_of_a_pool_may_differ(self, cluster: Cluster) -> None:
        pool = cluster.pool([3], cpus=[0.5, 0, 0.25])
        assert [dict(slot.resources) for slot in pool] == [{"cpu": 0.5}, {}, {"cpu": 0.25}]
        counter = cluster.start(Counter.bind(1), pool, distributed=False)
        assert counter.add(1) == [2, 2, 2]
        counter.group.close()
        cluster.release(pool)
        refuses(ConfigError, r"pool\(\[2\]\): 2 slots, and 1 amount of cpu", cluster.pool, [2], cpus=[1])
        refuses(ConfigError, r"pool\(spread=2\): slots that differ", cluster.pool, spread=2, cpus=[1, 0.5])

    def test_nodes_are_chosen_by_label_and_strategy(self, cluster: Cluster) -> None:
        refuses(PlacementError, "no node has them", cluster.pool, [1], labels={"podium.contract": "nowhere"})
        refuses(ConfigError, "'pack' or 'spread'", cluster.pool, [1], strategy="anywhere")
        for strategy in ("pack", "spread"):
            pool = cluster.pool(spread=2, cpus=0.25, strategy=strategy)
            assert len({slot.node for slot in pool}) == (min(2, len(cluster.nodes)) if strategy == "spread" else 1)
            cluster.release(pool)

    def test_accelerators_are_chosen_by_kind(self, cluster: Cluster) -> None:
        says = r"asked for 1 gpu on 1 node of the kind 'no such card 9'; no node has an"
        refuses(PlacementError, says, cluster.pool, [1], gpus=1, accelerator="no such card 9")
        refuses(
            PlacementError, "2 slots of 1 gpu each.*kind", cluster.pool, spread=2, gpus=1, accelerator="no such card 9"
        )
        refuses(ConfigError, r"pool\(accelerator='H100'\): say how many", cluster.pool, [1], accelerator="H100")
        refuses(PlacementError, "kind 'x'", cluster.start_replicas, Counter.bind(), 1, gpus=1, accelerator="x")
        for node in cluster.nodes:
            for kind in {*node.kinds} - {""}:
                pool = cluster.pool([1], gpus=1, accelerator=kind)
                assert pool[0].devices
                cluster.release(pool)

    def test_a_released_pool_cannot_be_used(self, cluster: Cluster) -> None:
        pool = cluster.pool([2])
        cluster.release(pool)
        cluster.release(pool)
        refuses(ConfigError, "has been released", cluster.start, Counter.bind(), pool[0:1])
        refuses(ConfigError, "empty pool", cluster.start, Counter.bind(), cluster.pool([1])[0:0])

    def test_waiting_for_a_pool_says_what_for(self, cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
        cores = cluster.nodes[0].resources["cpu"]
        pool = cluster.pool([1], cpus=cores)
        refuses(PlacementError, "asked for", cluster.pool, [1], cpus=cores, wait_s=0.3)
        threading.Timer(0.3, cluster.release, (pool,)).start()
        caplog.clear()
        with caplog.at_level("WARNING", "podium"):
            cluster.release(cluster.pool([1], cpus=cores, wait_s=30.0))
        assert re.search(r"waiting up to 30 s more for a pool: asked for .* held by: a pool without", caplog.text)

    def test_what_the_runtime_decides_cannot_be_set(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        for name in ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE"):
            refuses(ValueError, rf"start\(env=.*{name}.*cannot be set", cluster.start, Counter.bind(), env={name: "1"})

    def test_unknown_options_are_refused(self, cluster: Cluster) -> None:
        refuses(ConfigError, "no_such_option", cluster.start, Counter.bind(), options={"no_such_option": 1})
        assert cluster.start(Counter.bind(3), distributed=False).add(0) == [3]

    def test_replicas_are_independent(self, cluster: Cluster) -> None:
        refuses(ConfigError, r"start_replicas\(count=0\)", cluster.start_replicas, Counter.bind(), 0)
        with pytest.raises(PlacementError):
            cluster.start_replicas(Counter.bind(), 2, cpus=cluster.nodes[0].resources["cpu"])
        replicas = cluster.start_replicas(Counter.bind(1), 2, name="copies", distributed=False)
        assert [replica.group.name for replica in replicas] == ["copies-0", "copies-1"]
        assert replicas[0].add(4) == [5]
        assert [call.result() for call in replicas.submit("add", 0)] == [[5], [1]]
        if cluster.capabilities.processes:
            replicas.restart(0)
            assert [call.result() for call in replicas.submit("add", 0)] == [[1], [1]]
        refuses(ConfigError, r"restart\(2\): there are 2 replicas", replicas.restart, 2)
        replicas.close()

    def test_a_detached_group_is_found_by_name_and_stopped(self, cluster: Cluster) -> None:
        need(cluster, "detached")
        pool = cluster.pool([2], cpus=0.5, detached=True)
        attached_to_this_script = cluster.pool([1], cpus=0.1)
        with pytest.raises(ConfigError, match=r"pool\(detached=True\)"):
            cluster.start(Counter.bind(), attached_to_this_script, detached=True)
        cluster.release(attached_to_this_script)
        mine = cluster.start(Counter.bind(1), pool, name="standing", detached=True, distributed=False)
        mine.add(1)
        mine.group.close()
        theirs = cluster.attach("standing")
        assert theirs.add(1) == [3, 3]
        assert theirs.group.run(lambda worker: worker.ctx.rank) == [0, 1]
        for refused in (theirs.group.restart, lambda: cluster.start(Keeper.bind(), into=theirs)):
            refuses(ConfigError, "another controller", refused)
        theirs.group.close()
        assert cluster.attach("standing").add(1) == [4, 4]
        lost: list[object] = []
        unsubscribe = subscribe(lambda event: lost.append(event) if isinstance(event, WorkerLost) else None)
        cluster.stop("standing")
        refuses(ConfigError, "no detached group 'standing'", cluster.attach, "standing")
        unsubscribe()
        assert not lost, "it was stopped, not lost"

    def test_a_detached_group_outlives_its_controller_and_its_end_is_heard(
        self, target: Target, cluster: Cluster
    ) -> None:
        need(cluster, "detached")
        with target.connect() as other:
            pool = other.pool([2], detached=True)
            other.start(Counter.bind(1), pool, name="orphan", detached=True, distributed=False)
        theirs = cluster.attach("orphan")
        assert theirs.add(1) == [2, 2]
        refuses(WorkerDied, "rank 1 of orphan", theirs.group.run_on, 1, lambda worker: os._exit(3))
        refuses(ConfigError, "'orphan' has lost 1 of its 2 ranks", cluster.attach, "orphan")
        cluster.stop("orphan")
        refuses(ConfigError, "no detached group 'orphan'", cluster.attach, "orphan")

    def test_without_detached_groups_the_error_says_where_there_are_some(self, cluster: Cluster) -> None:
        if cluster.capabilities.detached:
            pytest.skip("it has detached groups")
        for refused in (
            lambda: cluster.attach("standing"),
            lambda: cluster.stop("standing"),
            lambda: cluster.pool([1], detached=True),
            lambda: cluster.start(Counter.bind(), detached=True),
        ):
            refuses(ConfigError, "no detached groups; `podium backends` shows who has", refused)

    def test_a_worker_knows_its_place_before_its_constructor_runs(self, cluster: Cluster) -> None:
        worker = cluster.start(Place.bind(), cluster.pool([3]), name="places", distributed=False)
        for rank, facts in enumerate(worker.facts()):
            assert facts.pop("threads") >= 1
            numbers = {"rank": rank, "world_size": 3, "local_rank": rank, "local_world_size": 3}
            rest = {"at_start": (rank, 3), "role": "places", "node": cluster.nodes[0].name, "devices": ()}
            assert facts == numbers | rest
        with pytest.raises(EndpointError, match="FrozenInstanceError"):
            worker.group.run(change_rank)

    def test_a_worker_can_be_reached_at_its_address_and_a_free_port(self, cluster: Cluster) -> None:
        group = cluster.start(Place.bind(), cluster.pool(2), distributed=False).group
        address, port = group.run_on(0, listen)
        assert group.run_on(1, reach, address, port) == "heard"
        assert group.run(lambda worker: worker.ctx.address) == [address] * 2

    def test_seeds_differ_by_rank_and_follow_from_the_groups(self, cluster: Cluster) -> None:
        def seeds(**seed: Any) -> list[int]:
            return cluster.start(Place.bind(), cluster.pool(2), distributed=False, **seed).seeds()

        default, others = seeds(), seeds(seed=2**70)
        assert seeds(seed=0) == default
        assert len({*default, *others}) == 4
        assert all(0 <= seed < 2**32 for seed in default + others)
        refuses(ConfigError, r"start\(seed=1\.5\)", cluster.start, Place.bind(), seed=1.5)

    def test_debug_records_frame_construction_and_calls(
        self, cluster: Cluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        quiet = cluster.start(Counter.bind(), distributed=False)
        with caplog.at_level("DEBUG", "podium"):
            counter = cluster.start(Counter.bind(), name="told", distributed=False)
            counter.group.run(listen_to_records)
            counter.add(1)
            quiet.add(1)
            (records,) = counter.group.run(lambda worker: worker.records)
        assert records[0] == "told.add begins on rank 0"
        assert re.fullmatch(r"told\.add is ok on rank 0 after [\d.]+ ms", records[1])
        assert len(records) == 2

    def test_chosen_calls_of_chosen_ranks_are_recorded(self, cluster: Cluster, tmp_path: Path) -> None:
        profile = Profile(calls=["double", "nap"], ranks=[1], count=2, directory=tmp_path / "traces")
        group = cluster.start(Sleeper.bind(), cluster.pool(2), name="told_on", profile=profile, distributed=False)
        for _ in range(4):
            assert group.double(torch.ones(3))[1].tolist() == [2.0] * 3
            group.nap(0.0)
            group.note("x")
        names = sorted(path.name for path in (tmp_path / "traces").iterdir())
        assert names == [f"told_on-1-{method}-{number}.json" for method in ("double", "nap") for number in (1, 2)]
        trace = (tmp_path / "traces" / "told_on-1-double-1.json").read_text()
        assert "aten::mul" in trace
        for wrong, says in (
            (Profile(calls=["duble"]), r"'duble' is no endpoint here; did you mean double\?"),
            (Profile(calls="double"), r"expected a list of endpoints, as in \['update'\]"),
            (Profile(calls=["double"], ranks=[0, 2]), "the group has 2 ranks, and no rank 2"),
            (Profile(calls=["double"], count=0), "count 1 or more"),
        ):
            refuses(ConfigError, says, cluster.start, Sleeper.bind(), cluster.pool(2), profile=wrong)

    def test_threads_are_the_slots_share_of_the_cores(self, cluster: Cluster) -> None:
        cores = int(cluster.nodes[0].resources["cpu"])
        pool = cluster.pool([1], cpus=cores)
        worker = cluster.start(Place.bind(), pool, distributed=False)
        assert worker.facts()[0]["threads"] == cores
        worker.group.close()
        cluster.release(pool)

    def test_named_meshes_are_in_the_context(self, cluster: Cluster) -> None:
        mesh = Mesh(dp=2, tp=2)
        group = cluster.start(Place.bind(), cluster.pool([4]), meshes={"train": mesh}, distributed=False).group
        assert group.run(coordinate_in, "train") == [{"dp": d, "tp": t} for d in range(2) for t in range(2)]
        assert group.run(coordinate_in, "default") == [{"dp": at} for at in range(4)]
        assert group.meshes["train"] == mesh
        with pytest.raises(ConfigError, match=r"mesh 'train' is Mesh\(dp=3\) of 3 ranks; the group has 2"):
            cluster.start(Place.bind(), cluster.pool([2]), meshes={"train": Mesh(dp=3)})

    def test_workers_declare_a_mesh_and_calls_go_by_it(self, cluster: Cluster) -> None:
        handle = cluster.start(Framework.bind(), cluster.pool([4]), name="framework", distributed=False)
        mesh = handle.group.meshes["model"]
        assert [mesh.coordinate(rank)["dp"] for rank in range(4)] == [1, 1, 0, 0]
        assert mesh.collectors("dp") == (3, 1), "one rank for each dp coordinate, at the last stage"
        for _ in range(2):
            assert handle.rows_and_ranks([5, 6, 7]) == [(5, 3), (6, 1), (7, 1)]
            assert handle.parts.pad()([5, 6, 7]) == [[5, 5], [6, 7]]
            refuses(ConfigError, r"framework\.one_more: .*the result of rank 3 has 2", handle.one_more, [5, 6, 7])
            says = r"shards over mesh 'model', which needs all ranks"
            refuses(ConfigError, says, handle.group.on([0, 1]).rows_and_ranks, [5])
            if cluster.capabilities.processes:
                handle.group.restart()
        handle.group.close()

    @pytest.mark.parametrize(
        ("fault", "says"),
        [
            ("twice", r"ranks 0 and 1 are both at|ranks 2 and 3 are both at \{'dp': 0, 'pp': 0, 'cp': 0\}"),
            ("a gap", r"no rank is at \{'dp': \d, 'pp': \d, 'cp': 0\} of Mesh\(dp=4, pp=2, cp=1\)"),
            ("other axes", r"rank 3 has the axes \['cp', 'dp', 'ep', 'pp'\], and rank 0 has \['cp', 'dp', 'pp'\]"),
            ("silence", r"ranks \[3\] do not; every rank calls ctx\.declare_mesh"),
            ("another output", r"rank 3 has output=\{'pp': 0\}, and rank 0 has \{'pp': -1\}"),
            ("a name of the script", r"was given by start\(meshes=\.\.\.\) too"),
        ],
    )
    def test_a_mesh_on_which_workers_do_not_agree_is_refused(self, cluster: Cluster, fault: str, says: str) -> None:
        pool = cluster.pool([4])
        with pytest.raises(ConfigError, match=rf"framework: mesh '\w+', which its workers declare.*{says}"):
            cluster.start(
                Framework.bind(fault), pool, name="framework", meshes={"train": Mesh(dp=4)}, distributed=False
            )
        cluster.release(pool)

    def test_a_second_group_inherits_the_environment_that_is_chosen(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        pool = cluster.pool([2])
        env = {"PODIUM_CONTRACT_KEPT": "kept", "PODIUM_CONTRACT_CHANGED": "before"}
        first = cluster.start(Counter.bind(), pool, env=env, distributed=False).group
        assert first.env == env
        with pytest.raises(TypeError):
            first.env["PODIUM_CONTRACT_KEPT"] = "other"  # pyright: ignore[reportIndexIssue] - the point
        names = [*env]
        for inherited in ({}, first.env, {**first.env, "PODIUM_CONTRACT_CHANGED": "after"}):
            second = cluster.start(Counter.bind(), pool, env=inherited, distributed=False).group
            assert second.run(read_environment, names) == [{**dict.fromkeys(env), **inherited}] * 2
            second.close()
        both = cluster.start(colocate(one=Counter.bind(), two=Counter.bind()), pool, env=env, distributed=False)
        assert both.one.group.env == both.two.group.env == env

    def test_colocated_workers_reach_each_other_as_plain_objects(self, cluster: Cluster) -> None:
        pair = colocate(bank=Counter.bind(10), keeper=Keeper.bind())
        both = cluster.start(pair, cluster.pool([2]), distributed=False)
        assert list(both) == ["bank", "keeper"]
        assert both["keeper"].neighbors() == [["bank", "keeper"]] * 2
        assert both.keeper.add_to_neighbor("bank", 5) == [15, 15]
        assert both.bank.add(0) == [15, 15]
        assert both.bank.group.shares_processes_with == ("keeper",)
        with pytest.raises(AttributeError, match=r"no worker 'bnak' here; there are \['bank', 'keeper'\]"):
            _ = both.bnak
        calls = [
            both.bank.add.submit(1) if at % 2 else both.keeper.add_to_neighbor.submit("bank", 1) for at in range(50)
        ]
        assert [call.result() for call in calls] == [[16 + at] * 2 for at in range(50)], "their calls keep one order"
        both.bank.group.close()
        assert both.keeper.neighbors() == [["keeper"]] * 2

    def test_colocated_workers_can_be_declared(self, cluster: Cluster) -> None:
        both = cluster.start(colocate(Pair, left=Counter.bind(1), keeper=Keeper.bind()), distributed=False)
        assert type(both) is Pair
        assert (both.left.add(1), both.keeper.neighbors()) == ([2], [["keeper", "left"]])
        says = r"colocate\(Pair, \.\.\.\): it declares \['keeper', 'left'\]; given are \['left'\]"
        refuses(ConfigError, says, colocate, Pair, left=Counter.bind())

    def test_the_name_of_a_colocated_group_is_kept(self, cluster: Cluster) -> None:
        started: list[str] = []
        unsubscribe = subscribe(lambda event: started.append(event.role) if isinstance(event, WorkerStarted) else None)
        pair = colocate(left=Counter.bind(1), right=Counter.bind(2))
        both = cluster.start(pair, cluster.pool([2]), name="a_pair", distributed=False)
        unsubscribe()
        assert started == ["a_pair"] * 2
        assert (both.left.add(0), both.right.add(0)) == ([1, 1], [2, 2])
        assert both.left.group.name == "left"
        refuses(ConfigError, "a group named 'a_pair' runs already", cluster.start, Counter.bind(), name="a_pair")
        again = colocate(third=Counter.bind())
        refuses(ConfigError, "have their name already", cluster.start, again, into=both.left, name="b_pair")
        refuses(ConfigError, "name='two words'", cluster.start, again, name="two words")
        both.left.group.close()
        both.right.group.close()
        refuses(CallCancelled, "group a_pair is closed", both.right.add, 1)

    def test_closing_a_colocated_worker_does_not_wait_for_its_sibling(self, cluster: Cluster, tmp_path: Path) -> None:
        need(cluster, "concurrent")
        pair = colocate(busy=Sleeper.bind(), other=Keeper.bind(closed_into=tmp_path))
        both = cluster.start(pair, cluster.pool([2]), name="siblings", distributed=False)
        call = both.busy.wait_for_event.submit(60.0)
        both.busy.peek()
        both.other.group.close()
        assert not call.done()
        assert len(list(tmp_path.iterdir())) == 2
        both.busy.set_event()
        assert call.result() == [True, True]

    def test_a_worker_is_added_to_processes_that_run(self, cluster: Cluster) -> None:
        counter = cluster.start(Counter.bind(1), cluster.pool([2]), name="first_in", distributed=False)
        keeper = cluster.start(Keeper.bind(), into=counter, name="second_in")
        assert keeper.add_to_neighbor("first_in", 2) == [3, 3]
        assert keeper.group.pids == counter.group.pids
        refuses(ConfigError, "processes run already", cluster.start, Keeper.bind(), cluster.pool([2]), into=counter)
        refuses(ConfigError, "expected a handle", cluster.start, Keeper.bind(), into="first_in")
        refuses(WorkerStartError, "ValueError: not today", cluster.start, Fails.bind(), into=counter, name="third_in")
        assert counter.add(0) == [3, 3], "processes outlive a worker that did not start in them"

    def test_a_start_into_processes_that_fails_leaves_nothing_there(self, cluster: Cluster) -> None:
        keeper = cluster.start(Keeper.bind(), cluster.pool([2]), name="at_home", distributed=False)
        half = colocate(guest=Counter.bind(), bad_guest=RaisesOn.bind(1))
        for worker, name in ((half, None), (RaisesOn.bind(1), "guest"), (RaisesOn.bind(0), "guest")):
            refuses(WorkerStartError, "does not want to start", cluster.start, worker, into=keeper, name=name)
            assert keeper.neighbors() == [["at_home"]] * 2
        guests = cluster.start(colocate(guest=Counter.bind(4), bad_guest=Counter.bind()), into=keeper)
        assert guests.guest.add(1) == [5, 5], "their names are free"
        assert keeper.neighbors() == [["at_home", "bad_guest", "guest"]] * 2

    def test_names(self, cluster: Cluster) -> None:
        first = cluster.start(Counter.bind(), name="only_one", distributed=False)
        assert "only_one[1]" in repr(first)
        refuses(ConfigError, "a group named 'only_one' runs already", cluster.start, Counter.bind(), name="only_one")
        first.group.close()
        again = cluster.start(Counter.bind(), name="only_one", distributed=False)
        assert again.add(1) == [1]
        assert cluster.start(CamelCaseName.bind(), distributed=False).group.name == "camel_case_name"

    @pytest.mark.parametrize("name", ["a/b", "../up", ".hidden", "two words", "-x"])
    def test_a_name_that_cannot_name_a_log_file_is_refused(self, cluster: Cluster, name: str) -> None:
        refuses(ConfigError, re.escape(f"name={name!r}"), cluster.start, Counter.bind(), name=name)

    def test_groups_started_at_once_get_names_of_their_own(self, cluster: Cluster) -> None:
        with ThreadPoolExecutor(6) as threads:
            counters = list(threads.map(lambda _: cluster.start(Counter.bind(), distributed=False), range(6)))
        assert len({counter.group.name for counter in counters}) == 6
        assert [counter.add(1) for counter in counters] == [[1]] * 6

    def test_only_bound_workers_are_started(self, cluster: Cluster) -> None:
        refuses(ConfigError, r"start\(\) takes Cls\.bind.*the class Counter", cluster.start, Counter)
        refuses(ValueError, "already wrapped", cluster.start, object())
        refuses(ConfigError, r"Counter\.bind\(\): got an unexpected keyword argument 'begin'", Counter.bind, begin=3)
        with pytest.raises(ConfigError, match=r"CamelCaseName\.bind\(\): too many positional arguments.*takes \(\)"):
            CamelCaseName.bind(1)  # pyright: ignore[reportCallIssue] - the point
        refuses(ConfigError, r"Place\.bind\(\): too many positional arguments", Place.bind, 1)

    def test_workers_made_by_value_are_started_too(self, cluster: Cluster) -> None:
        class Local(Worker):
            def __init__(self, factor: int) -> None:
                self.factor = factor

            @endpoint
            def times(self, x: int) -> int:
                return self.factor * x

        local = cluster.start(Local.bind(3), cluster.pool([2]), distributed=False)
        assert local.times(5) == [15, 15]

    def test_inherited_endpoints_are_endpoints_and_overridden_ones_are_what_they_became(self, cluster: Cluster) -> None:
        heir = cluster.start(Heir.bind(), distributed=False)
        assert heir.rank() == [100]
        refuses(AttributeError, "'echo' is no endpoint of Heir", getattr, heir, "echo")


class Pair(Colocated):
    """Two workers in one process."""

    left: Handle[Counter]
    keeper: Handle[Keeper]
