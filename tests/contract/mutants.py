"""Mutants of the example backend: each breaks a sentence of the contract, and a test of the public suite finds it.

A mutant is the example with some texts replaced. tests/contract/mutation.py makes and tries them.
"""

# ruff: noqa: E501 - texts of code, as they are in the example

from __future__ import annotations

from typing import Final

from tests.contract.edge_mutants import EDGE_MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant"]


MUTANTS: Final[dict[str, Mutant]] = {
    "aliases arguments": Mutant(
        "Values are copied when they are packed.",
        "test_what_the_caller_changes_after_submitting_is_not_seen",
        ("wire.py", "bytes(buffer.raw()) for buffer in buffers)]", "buffer.raw() for buffer in buffers)]"),
    ),
    "aliases one argument in fifty": Mutant(
        "Values are copied when they are packed.",
        "test_a_stopped_process_holds_up_nobody",
        (
            "wire.py",
            "bytes(buffer.raw()) for buffer in buffers)]",
            "(buffer.raw() if next(_turns) % 50 == 0 else bytes(buffer.raw())) for buffer in buffers)]",
        ),
    ),
    "aliases large arguments": Mutant(
        "Values are copied when they are packed.",
        "test_a_stopped_process_holds_up_nobody",
        (
            "wire.py",
            "bytes(buffer.raw()) for buffer in buffers)]",
            "(buffer.raw() if buffer.raw().nbytes > 1 << 22 else bytes(buffer.raw())) for buffer in buffers)]",
        ),
    ),
    "gives memory that cannot be written": Mutant(
        "What arrives is its reader's own, and can be written.",
        "test_numpy_arrays_come_back_equal_and_as_writable_as_they_were",
        ("wire.py", "    return whole\n", "    return bytes(whole)\n"),
    ),
    "gives large memory that cannot be written": Mutant(
        "What arrives is its reader's own, and can be written.",
        "test_large_messages_arrive_whole_and_can_be_written",
        ("wire.py", "    return whole\n", "    return bytes(whole) if size > 1 << 22 else whole\n"),
    ),
    "spoils parts above 16 MiB": Mutant(
        "A value of any size arrives.",
        "test_large_messages_arrive_whole_and_can_be_written",
        ("wire.py", "    return whole\n", "    if size > 1 << 24:\n        whole[-1] ^= 1\n    return whole\n"),
    ),
    "spoils parts above 256 MiB": Mutant(
        "A value of any size arrives.",
        "test_large_messages_arrive_whole_and_can_be_written",
        ("wire.py", "    return whole\n", "    if size > 1 << 28:\n        whole[-1] ^= 1\n    return whole\n"),
    ),
    "spoils parts above 2 GiB": Mutant(
        "A value of any size arrives.",
        "test_a_message_of_more_than_2_gib_arrives_whole",
        ("wire.py", "    return whole\n", "    if size > 1 << 31:\n        whole[-1] ^= 1\n    return whole\n"),
    ),
    "spoils messages above 2 GiB": Mutant(
        "A value of any size arrives.",
        "test_a_message_of_more_than_2_gib_arrives_whole",
        (
            "wire.py",
            "    return head, [[",
            "    if sum(map(sum, sizes)) > 1 << 31:\n        raise EOFError\n    return head, [[",
        ),
    ),
    "takes a thousand buffers": Mutant(
        "A value of any size arrives.",
        "test_messages_of_many_parts_arrive_whole",
        ("wire.py", "for buffer in buffers)]", "for buffer in buffers[:1000])]"),
    ),
    "uses memory again": Mutant(
        "What arrives is its reader's own, and can be written.",
        "test_what_a_worker_or_the_caller_keeps_stays_as_it_was",
        (
            "wire.py",
            "    whole = bytearray(size)\n",
            "    at = next(_turns) % 16\n    if size > 1 << 16:\n        _kept.append((at, size, bytearray(size))) if not [k for k in _kept if k[:2] == (at, size)] else None\n        whole = [k for k in _kept if k[:2] == (at, size)][0][2]\n    else:\n        whole = bytearray(size)\n",
        ),
    ),
    "lets one request in fifty be overtaken": Mutant(
        "Requests run in the order of `invoke`.",
        "test_large_and_small_calls_keep_their_order_and_run_once",
        (
            "backend.py",
            "        self._requests.put(request)\n",
            "        if request.number % 50 == 0 and request.target:\n            return threading.Timer(0.005, self._requests.put, [request]).start()\n        self._requests.put(request)\n",
        ),
    ),
    "lets large requests be overtaken": Mutant(
        "Requests run in the order of `invoke`.",
        "test_large_and_small_calls_keep_their_order_and_run_once",
        (
            "backend.py",
            "        self._requests.put(request)\n",
            "        if sum(len(part) for part in request.shared) > 1 << 20:\n            return threading.Timer(0.005, self._requests.put, [request]).start()\n        self._requests.put(request)\n",
        ),
    ),
    "lets small requests wait": Mutant(
        "Requests run in the order of `invoke`.",
        "test_large_and_small_calls_keep_their_order_and_run_once",
        (
            "backend.py",
            "        self._requests.put(request)\n",
            "        if not request.wants_result and request.target:\n            return threading.Timer(0.005, self._requests.put, [request]).start()\n        self._requests.put(request)\n",
        ),
    ),
    "sends one request in fifty twice": Mutant(
        "A call is delivered at most once.",
        "test_large_and_small_calls_keep_their_order_and_run_once",
        (
            "backend.py",
            "        self._requests.put(request)\n",
            "        self._requests.put(request)\n        if request.number % 50 == 0 and request.target:\n            self._requests.put(request)\n",
        ),
    ),
    "sends concurrent requests twice": Mutant(
        "A call is delivered at most once.",
        "test_calls_at_once_run_once_and_have_replies_of_their_own",
        (
            "backend.py",
            "        self._requests.put(request)\n",
            "        self._requests.put(request)\n        if request.concurrent and request.target:\n            self._requests.put(request)\n",
        ),
    ),
    "sends large requests twice": Mutant(
        "A call is delivered at most once.",
        "test_large_and_small_calls_keep_their_order_and_run_once",
        (
            "backend.py",
            "        self._requests.put(request)\n",
            "        self._requests.put(request)\n        if sum(len(part) for part in request.shared) > 1 << 20:\n            self._requests.put(request)\n",
        ),
    ),
    "sends again after a second": Mutant(
        "A call is delivered at most once.",
        "test_a_call_that_takes_long_runs_once",
        (
            "backend.py",
            "        self._requests.put(request)\n",
            "        self._requests.put(request)\n        again = lambda: self._requests.put(request) if request.number in self._pending and request.target else None\n        timer = threading.Timer(1.0, again)\n        timer.daemon = True\n        timer.start()\n",
        ),
    ),
    "sends again after a restart": Mutant(
        "A call is delivered at most once.",
        "test_a_restart_repeats_no_call",
        (
            "backend.py",
            "        self._requests.put(request)\n",
            "        self._requests.put(request)\n        if request.target:\n            self._backend.unanswered[self._log.path, request.number, self] = request\n",
        ),
        (
            "backend.py",
            "        self.accelerators = accelerators()\n",
            "        self.accelerators = accelerators()\n        self.unanswered = {}\n",
        ),
        (
            "backend.py",
            "                if done := self._pending.pop(number, None):\n",
            "                if self._backend.unanswered.pop((self._log.path, number, self), None) and not hasattr(self, 'late'):\n                    self.late = True\n                    for key in [key for key in self._backend.unanswered if key[0] == self._log.path and key[2] is not self]:\n                        self._requests.put(self._backend.unanswered.pop(key))\n                if done := self._pending.pop(number, None):\n",
        ),
    ),
    "swaps replies now and then": Mutant(
        "`done` is called once, with the reply to its own request.",
        "test_calls_at_once_run_once_and_have_replies_of_their_own",
        (
            "backend.py",
            "            self.pid, _ = receive(self._connection)\n",
            "            self.pid, _ = receive(self._connection)\n            self._concurrent, self._swap = set(), {}\n",
        ),
        (
            "backend.py",
            "        self._requests.put(request)\n",
            "        if request.concurrent and request.target:\n            self._concurrent.add(request.number)\n        self._requests.put(request)\n",
        ),
        (
            "backend.py",
            "                if done := self._pending.pop(number, None):\n",
            "                number = self._swap.pop(number, number)\n                others = [n for n in self._concurrent & {*self._pending} if n != number and n not in self._swap.values() and n not in self._swap]\n                if number in self._concurrent and others and next(_turns) % 50 == 0:\n                    self._swap[others[0]] = number\n                    number = others[0]\n                if done := self._pending.pop(number, None):\n",
        ),
    ),
    "loses one reply in fifty": Mutant(
        "`done` is called once, with the reply to its own request.",
        "test_large_and_small_calls_keep_their_order_and_run_once",
        (
            "backend.py",
            "                if done := self._pending.pop(number, None):\n",
            "                if (done := self._pending.pop(number, None)) and next(_turns) % 50:\n",
        ),
    ),
    "doubles start limits": Mutant(
        "A process that does not take requests within `timeout_s` has failed to start.",
        "test_a_process_has_its_whole_limit_to_start_and_no_more",
        (
            "backend.py",
            "until = time.monotonic() + specs[0].timeout_s",
            "until = time.monotonic() + 2 * specs[0].timeout_s",
        ),
    ),
    "halves start limits": Mutant(
        "A process that does not take requests within `timeout_s` has failed to start.",
        "test_a_process_has_its_whole_limit_to_start_and_no_more",
        (
            "backend.py",
            "until = time.monotonic() + specs[0].timeout_s",
            "until = time.monotonic() + specs[0].timeout_s / 2",
        ),
    ),
    "starts one group at a time": Mutant(
        "Any thread may call any method.",
        "test_a_start_that_hangs_does_not_hold_up_another",
        (
            "backend.py",
            "        until = time.monotonic()",
            "        with _lock:\n            return self._start(specs, on_death)\n\n    def _start(self, specs: Any, on_death: Any) -> Any:\n        until = time.monotonic()",
        ),
    ),
    "loses last words at SIGKILL": Mutant(
        "`Death` has the cause and the last lines of stderr.",
        "test_each_end_has_its_cause_and_last_words",
        (
            "backend.py",
            "Death(cause, self._log.last_lines())",
            "Death(cause, self._log.last_lines() if int(code or 0) != -9 else ())",
        ),
    ),
    "has the last five words": Mutant(
        "`Death` has the cause and the last lines of stderr.",
        "test_each_end_has_its_cause_and_last_words",
        ("backend.py", "Death(cause, self._log.last_lines())", "Death(cause, self._log.last_lines()[-5:])"),
    ),
    "loses last words after a restart": Mutant(
        "`Death` has the cause and the last lines of stderr.",
        "test_each_end_has_its_cause_and_last_words",
        (
            "backend.py",
            "Death(cause, self._log.last_lines())",
            "Death(cause, self._log.last_lines() if not self._log.start else ())",
        ),
    ),
    "takes great exit codes for signals": Mutant(
        "`Death` has the cause and the last lines of stderr.",
        "test_each_end_has_its_cause_and_last_words",
        ("backend.py", "describe_exit(int(code))", "describe_exit(128 - int(code) if int(code) > 128 else int(code))"),
    ),
    "calls all signals SIGKILL": Mutant(
        "`Death` has the cause and the last lines of stderr.",
        "test_each_end_has_its_cause_and_last_words",
        ("backend.py", "describe_exit(int(code))", "describe_exit(-9 if int(code) < 0 else int(code))"),
    ),
    "does not know exit code 0": Mutant(
        "`Death` has the cause and the last lines of stderr.",
        "test_each_end_has_its_cause_and_last_words",
        ("backend.py", "describe_exit(int(code))", "describe_exit(int(code) or 1)"),
    ),
    "kills in one thread": Mutant(
        "Any thread may call any method.",
        "test_threads_may_kill_at_once",
        (
            "backend.py",
            "    def kill(self) -> None:\n",
            "    def kill(self) -> None:\n        if getattr(self, '_killing', False):\n            return\n        self._killing = True\n",
        ),
    ),
    "sends in invoke": Mutant(
        "`invoke` does not wait.",
        "test_a_stopped_process_holds_up_nobody",
        (
            "backend.py",
            "        self._requests.put(request)\n",
            "        with self._sending:\n            head = (request.number, request.target, request.method, request.wants_result, request.concurrent)\n            with contextlib.suppress(OSError):\n                send(self._connection, head, request.shared, *([] if request.own is None else [request.own]))\n",
        ),
        (
            "backend.py",
            "        backend.processes.add(self)\n",
            "        backend.processes.add(self)\n        self._sending = threading.Lock()\n",
        ),
    ),
    "sends to one process at a time": Mutant(
        "`invoke` does not wait.",
        "test_a_stopped_process_holds_up_nobody",
        (
            "backend.py",
            "                send(self._connection, head",
            "                with _lock:\n                    send(self._connection, head",
        ),
    ),
    "keeps replies": Mutant(
        "Memory of values is freed with their last user.",
        "test_memory_of_values_is_given_back",
        (
            "backend.py",
            "                    done(Reply(status, payload, *times))\n",
            "                    done(Reply(status, payload, *times))\n                _kept.append(payload)\n",
        ),
    ),
    "keeps requests": Mutant(
        "Memory of values is freed with their last user.",
        "test_memory_of_values_is_given_back",
        (
            "backend.py",
            "        self._requests.put(request)\n",
            "        self._requests.put(request)\n        _kept.append(request)\n",
        ),
    ),
    "keeps results in workers": Mutant(
        "Memory of values is freed with their last user.",
        "test_memory_of_values_is_given_back",
        ("worker.py", "        with sending:\n", "        _kept.append(parcel)\n        with sending:\n"),
    ),
    "keeps arguments in workers": Mutant(
        "Memory of values is freed with their last user.",
        "test_memory_of_values_is_given_back",
        (
            "worker.py",
            "        return values[0] | values[-1]\n",
            "        _kept.append(values)\n        return values[0] | values[-1]\n",
        ),
    ),
    "copies for each reader": Mutant(
        "A value for several readers is stored once.",
        "test_an_argument_for_many_processes_is_stored_once",
        (
            "backend.py",
            "        self._requests.put(request)\n",
            "        request = __import__('dataclasses').replace(request, shared=[bytearray(part) for part in request.shared])\n        self._requests.put(request)\n",
        ),
    ),
    "leaks descriptors": Mutant(
        "What ended leaves nothing behind.",
        "test_restarts_leave_nothing_behind",
        (
            "backend.py",
            "        self._connection.close()\n",
            "        _kept.append(os.dup(self._connection.fileno()))\n        self._connection.close()\n",
        ),
    ),
    "gives workers all descriptors": Mutant(
        "What ended leaves nothing behind.",
        "test_restarts_leave_nothing_behind",
        ("nursery.py", "    os.closerange(worker.CONNECTION + 1, 1 << 16)\n", ""),
    ),
    "leaks threads": Mutant(
        "What ended leaves nothing behind.",
        "test_restarts_leave_nothing_behind",
        ("backend.py", "        self._requests.put(None)\n", ""),
    ),
    "leaves a zombie": Mutant(
        "What ended leaves nothing behind.",
        "test_closing_from_threads_and_with_calls_in_flight",
        (
            "backend.py",
            "        self._nursery.wait()\n",
            "        __import__('subprocess')._active.append(self._nursery) if False else _kept.append(self._nursery)\n",
        ),
    ),
    "leaves its files": Mutant(
        "What ended leaves nothing behind.",
        "test_nothing_outlives_a_script_that_ends_by",
        ("backend.py", "        self.files.close()\n", ""),
        ("nursery.py", "        shutil.rmtree(private, ignore_errors=True)\n", "        pass\n"),
    ),
    "gives env to later groups": Mutant(
        "`env` is set before anything is imported, for the processes of the spec alone.",
        "test_variables_are_those_of_the_group_and_of_every_rank",
        (
            "nursery.py",
            "                pid = supervisor.fork(partial(_become_worker, connection, *pickle.loads(message)))\n",
            "                os.environ.update(pickle.loads(message)[0])\n                pid = supervisor.fork(partial(_become_worker, connection, *pickle.loads(message)))\n",
        ),
    ),
    "gives env to the controller": Mutant(
        "`env` is set before anything is imported, for the processes of the spec alone.",
        "test_variables_are_those_of_the_group_and_of_every_rank",
        (
            "backend.py",
            "        env = environment_of(spec, backend.accelerators)\n",
            "        env = environment_of(spec, backend.accelerators)\n        os.environ.update(spec.env)\n",
        ),
    ),
    "gives env to rank 0": Mutant(
        "`env` is set before anything is imported, for the processes of the spec alone.",
        "test_variables_are_those_of_the_group_and_of_every_rank",
        (
            "backend.py",
            "        env = environment_of(spec, backend.accelerators)\n",
            "        env = environment_of(spec if not spec.rank else __import__('dataclasses').replace(spec, env={}), backend.accelerators)\n",
        ),
    ),
    "gives no env after a restart": Mutant(
        "`env` is set before anything is imported, for the processes of the spec alone.",
        "test_variables_are_those_of_the_group_and_of_every_rank",
        (
            "backend.py",
            "        env = environment_of(spec, backend.accelerators)\n",
            "        env = environment_of(__import__('dataclasses').replace(spec, env={}) if self._log.path in _kept else _kept.append(self._log.path) or spec, backend.accelerators)\n",
        ),
    ),
    "drops empty variables": Mutant(
        "`env` is set before anything is imported, for the processes of the spec alone.",
        "test_variables_are_those_of_the_group_and_of_every_rank",
        (
            "backend.py",
            "        env = environment_of(spec, backend.accelerators)\n",
            "        env = environment_of(spec, backend.accelerators)\n        env = {name: value for name, value in env.items() if value}\n",
        ),
    ),
    "works where the first worker did": Mutant(
        "A worker process starts in the directory in which the controller is then.",
        "test_each_start_and_restart_is_where_the_controller_is_then",
        ("backend.py", "Surroundings.here(spec.threads)\n", "backend.here(spec.threads)\n"),
        (
            "backend.py",
            "        self.accelerators = accelerators()\n",
            "        self.accelerators = accelerators()\n        self.here = __import__('functools').cache(Surroundings.here)\n",
        ),
    ),
    "leaves children of their own sessions": Mutant(
        "`kill` ends the process and its children; so does every other end.",
        "test_whatever_a_process_started_ends_when_it",
        (
            "nursery.py",
            "    supervisor.settle()\n",
            "    supervisor.settle()\n    from podium.processes import supervisor as module\n    module.children_of = lambda pid: []\n",
        ),
    ),
    "leaves children of what ends by itself": Mutant(
        "`kill` ends the process and its children; so does every other end.",
        "test_whatever_a_process_started_ends_when_it",
        (
            "nursery.py",
            "    supervisor.settle()\n",
            "    supervisor.settle()\n    from podium.processes import supervisor as module\n    plain = module.children_of\n    killed = set()\n    kill_one = supervisor.kill\n    def kill_it(pid):\n        killed.add(pid)\n        kill_one(pid)\n    supervisor.kill = kill_it\n    module.children_of = lambda pid: plain(pid) if killed and (killed.clear() or True) else []\n",
        ),
    ),
    "leaves grandchildren of the script": Mutant(
        "When the controller ends, in whatever way, its worker processes and their children end within seconds.",
        "test_nothing_outlives_a_script_that_ends_by",
        (
            "nursery.py",
            "        supervisor.end()\n",
            "        for pid in list(processes):\n            supervisor.kill(pid)\n        os._exit(0)\n",
        ),
    ),
    "runs one concurrent call at a time": Mutant(
        "Concurrent requests run at once, beside others.",
        "test_calls_of_one_concurrent_endpoint_overlap",
        (
            "worker.py",
            "process.execute_concurrently(*request) if concurrent else",
            "(_kept or _kept.append(__import__('concurrent.futures').futures.ThreadPoolExecutor(1))) or _kept[0].submit(process.execute, *request[:4]).add_done_callback(lambda f, d=request[4]: d(f.result())) if concurrent and target else process.execute_concurrently(*request) if concurrent else",
        ),
    ),
    "runs four concurrent calls at a time": Mutant(
        "Concurrent requests run at once, beside others.",
        "test_calls_of_one_concurrent_endpoint_overlap",
        (
            "worker.py",
            "process.execute_concurrently(*request) if concurrent else",
            "(_kept or _kept.append(__import__('concurrent.futures').futures.ThreadPoolExecutor(4))) or _kept[0].submit(process.execute, *request[:4]).add_done_callback(lambda f, d=request[4]: d(f.result())) if concurrent and target else process.execute_concurrently(*request) if concurrent else",
        ),
    ),
    "sends replies without a lock": Mutant(
        "`done` is called once, with the reply to its own request.",
        "test_calls_at_once_run_once_and_have_replies_of_their_own",
        ("worker.py", "        with sending:\n", "        if True:\n"),
    ),
    "sees ends five seconds late": Mutant(
        "The end of a process is reported at once.",
        "test_an_end_is_heard_within_seconds",
        (
            "backend.py",
            "        code = self._leash.recv(16)\n",
            "        code = self._leash.recv(16)\n        time.sleep(0 if code == b'0' else 5)\n",
        ),
    ),
    "shows no output after a restart": Mutant(
        "What worker processes print appears.",
        "test_each_end_has_its_cause_and_last_words",
        ("backend.py", "str(self._log.path)", "(str(self._log.path) if not self._log.start else '/dev/null')"),
    ),
    "shows no stderr": Mutant(
        "What worker processes print appears.",
        "test_a_death_is_named_now_and_later_until_restart",
        (
            "nursery.py",
            "devnull, os.O_RDONLY), out, out,",
            "devnull, os.O_RDONLY), out, os.open(os.devnull, os.O_WRONLY),",
        ),
    ),
    "store aliases": Mutant(
        "A store copies, counts, names and frees its blocks.",
        "test_a_store_copies_counts_names_and_refuses",
        (
            "wire.py",
            "def pack(value",
            "from podium.data import MemoryStore, Block, BlockInfo, PlainBlock\nimport numpy as np\n\nclass OwnStore(MemoryStore):\n    def make(self, buffers, offsets, info):\n        if len(buffers) == 1 and buffers[0].nbytes == info.nbytes:\n            return PlainBlock(buffers[0].view(), info)\n        return super().make(buffers, offsets, info)\n\n\n\ndef pack(value",
        ),
        (
            "backend.py",
            "    def rendezvous(self",
            "    def store(self):\n        from podium_streams.wire import OwnStore\n        return OwnStore()\n\n    def rendezvous(self",
        ),
        (
            "worker.py",
            "WorkerProcess(), threading.Lock()",
            "WorkerProcess(make_store=__import__('podium_streams.wire').wire.OwnStore), threading.Lock()",
        ),
    ),
    "store counts nothing": Mutant(
        "A store copies, counts, names and frees its blocks.",
        "test_a_store_copies_counts_names_and_refuses",
        (
            "wire.py",
            "def pack(value",
            "from podium.data import MemoryStore, Block, BlockInfo, PlainBlock\nimport numpy as np\n\nclass OwnStore(MemoryStore):\n    def kept(self):\n        return super().kept().__class__()\n\n\n\ndef pack(value",
        ),
        (
            "backend.py",
            "    def rendezvous(self",
            "    def store(self):\n        from podium_streams.wire import OwnStore\n        return OwnStore()\n\n    def rendezvous(self",
        ),
        (
            "worker.py",
            "WorkerProcess(), threading.Lock()",
            "WorkerProcess(make_store=__import__('podium_streams.wire').wire.OwnStore), threading.Lock()",
        ),
    ),
    "store never forgets": Mutant(
        "A store copies, counts, names and frees its blocks.",
        "test_a_store_copies_counts_names_and_refuses",
        (
            "wire.py",
            "def pack(value",
            "from podium.data import MemoryStore, Block, BlockInfo, PlainBlock\nimport numpy as np\n\nclass OwnStore(MemoryStore):\n    def make(self, buffers, offsets, info):\n        _kept.append(super().make(buffers, offsets, info))\n        return _kept[-1]\n\n\n\ndef pack(value",
        ),
        (
            "backend.py",
            "    def rendezvous(self",
            "    def store(self):\n        from podium_streams.wire import OwnStore\n        return OwnStore()\n\n    def rendezvous(self",
        ),
        (
            "worker.py",
            "WorkerProcess(), threading.Lock()",
            "WorkerProcess(make_store=__import__('podium_streams.wire').wire.OwnStore), threading.Lock()",
        ),
    ),
    "store has no limit": Mutant(
        "A store copies, counts, names and frees its blocks.",
        "test_a_store_copies_counts_names_and_refuses",
        (
            "wire.py",
            "def pack(value",
            "from podium.data import MemoryStore, Block, BlockInfo, PlainBlock\nimport numpy as np\n\nclass OwnStore(MemoryStore):\n    def overflow(self, buffers, offsets, info):\n        return self.make(buffers, offsets, info)\n\n\n\ndef pack(value",
        ),
        (
            "backend.py",
            "    def rendezvous(self",
            "    def store(self):\n        from podium_streams.wire import OwnStore\n        return OwnStore()\n\n    def rendezvous(self",
        ),
        (
            "worker.py",
            "WorkerProcess(), threading.Lock()",
            "WorkerProcess(make_store=__import__('podium_streams.wire').wire.OwnStore), threading.Lock()",
        ),
    ),
    "store forgets who": Mutant(
        "A store copies, counts, names and frees its blocks.",
        "test_a_reference_tells_what_it_stands_for",
        (
            "wire.py",
            "def pack(value",
            "from podium.data import MemoryStore, Block, BlockInfo, PlainBlock\nimport numpy as np\n\nclass OwnStore(MemoryStore):\n    def make(self, buffers, offsets, info):\n        return super().make(buffers, offsets, info._replace(label='somebody'))\n\n\n\ndef pack(value",
        ),
        (
            "backend.py",
            "    def rendezvous(self",
            "    def store(self):\n        from podium_streams.wire import OwnStore\n        return OwnStore()\n\n    def rendezvous(self",
        ),
        (
            "worker.py",
            "WorkerProcess(), threading.Lock()",
            "WorkerProcess(make_store=__import__('podium_streams.wire').wire.OwnStore), threading.Lock()",
        ),
    ),
    "frees one block in fifty while it is read": Mutant(
        "A block lives as long as a `Block` object for it does, in any process.",
        "test_references_stay_while_somebody_has_them",
        (
            "wire.py",
            "def pack(value",
            "from podium.data import PlainBlock\n\n_begin = PlainBlock.__init__\n\n\ndef _free(memory: Any) -> None:\n    __import__('ctypes').memset(memory.ctypes.data, 0, memory.nbytes)\n\n\ndef _begin_some(self: Any, memory: Any, info: Any) -> None:\n    _begin(self, memory, info)\n    if next(_turns) % 50 == 0:\n        _threading.Timer(0.05, _free, [memory]).start()\n\n\nPlainBlock.__init__ = _begin_some\n\n\ndef pack(value",
        ),
    ),
    "loses requests to cancel": Mutant(
        "Requests to the process itself are carried as any other.",
        "test_a_running_async_endpoint_is_cancelled",
        (
            "backend.py",
            "        self._pending[request.number] = done\n",
            "        if request.method == 'cancel':\n            return\n        self._pending[request.number] = done\n",
        ),
    ),
    "does not end at SIGTERM": Mutant(
        "A backend leaves the script's signals as they are.",
        "test_nothing_outlives_a_script_that_ends_by",
        (
            "backend.py",
            "        self.files = Files()\n",
            "        self.files = Files()\n        import signal\n        if threading.current_thread() is threading.main_thread():\n            signal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
        ),
    ),
    "leaves its own process": Mutant(
        "When the controller ends, in whatever way, its worker processes and their children end within seconds.",
        "test_nothing_outlives_a_script_that_ends_by",
        (
            "nursery.py",
            "        supervisor.end()\n",
            "        supervisor.end()\n        import time\n        time.sleep(600) if os.getppid() == 1 else None\n",
        ),
    ),
    "ignores SIGTERM in workers": Mutant(
        "`Death` has the cause and the last lines of stderr.",
        "test_each_end_has_its_cause_and_last_words",
        (
            "nursery.py",
            "    os.environ.update(env)\n",
            "    os.environ.update(env)\n    import signal\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
        ),
    ),
    "raises for a process that ended": Mutant(
        "`on_death` reports what `done` does not.",
        "test_kill_returns_when_the_end_was_reported",
        (
            "backend.py",
            "        self._pending[request.number] = done\n",
            "        if self._ended.is_set():\n            raise OSError('it has ended')\n        self._pending[request.number] = done\n",
        ),
    ),
    "closes in one thread": Mutant(
        "Any thread may call any method.",
        "test_closing_from_threads_and_with_calls_in_flight",
        (
            "backend.py",
            "        for process in list(self.processes):\n            process.kill()\n        self.orders",
            "        if _kept:\n            return\n        _kept.append(1)\n        for process in list(self.processes):\n            process.kill()\n        self.orders",
        ),
    ),
    **EDGE_MUTANTS,
}
