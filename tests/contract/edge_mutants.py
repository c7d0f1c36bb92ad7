"""Mutants of the example backend in sizes, ends and output, and in what happens at once; see tests/contract/mutants.py."""

# ruff: noqa: E501 - texts of code, as they are in the example

from __future__ import annotations

from typing import Final

__all__ = ["EDGE_MUTANTS", "Mutant"]


class Mutant:
    """A sentence of the contract, the test that finds that it is broken, and what is replaced: file, text, new text."""

    def __init__(self, sentence: str, test: str, *edits: tuple[str, str, str]) -> None:
        self.sentence, self.test, self.edits = sentence, test, edits


EDGE_MUTANTS: Final[dict[str, Mutant]] = {
    "swaps exit codes of processes that end together": Mutant(
        "`Death` has the cause and the last lines of stderr.",
        "test_processes_that_end_at_once_have_causes_and_words_of_their_own",
        (
            "nursery.py",
            "for pid, status in supervisor.reap():\n",
            "ended = (__import__('time').sleep(0.1), list(supervisor.reap()))[1]\n            for (pid, _), (_, status) in zip(ended, ended[1:] + ended[:1], strict=True):\n",
        ),
    ),
    "swaps last words of processes that end together": Mutant(
        "`Death` has the cause and the last lines of stderr.",
        "test_processes_that_end_at_once_have_causes_and_words_of_their_own",
        (
            "backend.py",
            "Death(cause, self._log.last_lines())",
            "Death(cause, (_kept.append(self._log), time.sleep(0.2), _kept)[-1][-1].last_lines())",
        ),
    ),
    "loses last words without an end of line": Mutant(
        "`Death` has the cause and the last lines of stderr.",
        "test_processes_that_end_at_once_have_causes_and_words_of_their_own",
        (
            "backend.py",
            "Death(cause, self._log.last_lines())",
            "Death(cause, self._log.last_lines() if self._log.path.read_bytes()[-1:] in (b'', b'\\n') else self._log.last_lines()[:-1])",
        ),
    ),
    "loses last words that are no text": Mutant(
        "`Death` has the cause and the last lines of stderr.",
        "test_processes_that_end_at_once_have_causes_and_words_of_their_own",
        (
            "backend.py",
            "Death(cause, self._log.last_lines())",
            "Death(cause, () if b'\\xff' in self._log.path.read_bytes() else self._log.last_lines())",
        ),
    ),
    "loses one piece of output in fifty": Mutant(
        "What worker processes print appears.",
        "test_all_that_workers_print_appears_in_order",
        (
            "worker.py",
            '.settle_in("lo")\n',
            '.settle_in("lo")\n    write = sys.stdout.write\n    sys.stdout.write = lambda text: write(text) if next(_turns) % 50 else len(text)\n',
        ),
    ),
    "cuts long lines of output": Mutant(
        "What worker processes print appears.",
        "test_all_that_workers_print_appears_in_order",
        (
            "worker.py",
            '.settle_in("lo")\n',
            '.settle_in("lo")\n    write = sys.stdout.write\n    sys.stdout.write = lambda text: write(text[:4096])\n',
        ),
    ),
    "shows lines of output out of order": Mutant(
        "What worker processes print appears.",
        "test_all_that_workers_print_appears_in_order",
        (
            "worker.py",
            '.settle_in("lo")\n',
            '.settle_in("lo")\n    write = sys.stdout.write\n    def late(text):\n        if text.strip() and next(_turns) % 20 == 0:\n            _kept.append(text + "\\n")\n            return len(text)\n        return write(text) + sum(write(_kept.pop()) for _ in [*_kept] if text.endswith("\\n"))\n    sys.stdout.write = late\n',
        ),
    ),
    "shows only what Python prints": Mutant(
        "What worker processes print appears.",
        "test_all_that_workers_print_appears_in_order",
        (
            "worker.py",
            '.settle_in("lo")\n',
            '.settle_in("lo")\n    sys.stdout = open(os.dup(1), "w", buffering=1)\n    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)\n',
        ),
    ),
    "takes 16 KiB of what a start is told": Mutant(
        "`env` is set before anything is imported, for the processes of the spec alone.",
        "test_groups_that_start_at_once_have_variables_of_their_own",
        ("nursery.py", "1 << 18", "1 << 14"),
    ),
    "gives env to what starts at the same time": Mutant(
        "`env` is set before anything is imported, for the processes of the spec alone.",
        "test_groups_that_start_at_once_have_variables_of_their_own",
        ("nursery.py", "    os.environ.update(env)\n", "    os.environ.update(env)\n"),
        (
            "nursery.py",
            "pid = supervisor.fork(partial(_become_worker, connection, *pickle.loads(message)))\n",
            "env, fresh, *rest = pickle.loads(message)\n                now = __import__('time').monotonic()\n                if not fresh and _kept and now - _kept[-1][0] < 0.5:\n                    env = {**_kept[-1][1], **env}\n                if fresh:\n                    _kept.append((now, env))\n                pid = supervisor.fork(partial(_become_worker, connection, env, fresh, *rest))\n",
        ),
    ),
    "spares what ignores SIGTERM": Mutant(
        "`kill` ends the process and its children; so does every other end.",
        "test_a_process_that_is_stopped_or_ignores_signals_is_killed",
        (
            "nursery.py",
            "supervisor.kill(pid)\n",
            "supervisor.kill(pid) if not int(open(f'/proc/{pid}/status').read().partition('SigIgn:')[2].split()[0], 16) >> 14 & 1 else supervisor.poller.unregister(leash)\n",
        ),
    ),
    "spares what is stopped": Mutant(
        "`kill` ends the process and its children; so does every other end.",
        "test_a_process_that_is_stopped_or_ignores_signals_is_killed",
        (
            "nursery.py",
            "supervisor.kill(pid)\n",
            "supervisor.kill(pid) if '(stopped)' not in open(f'/proc/{pid}/status').read() else supervisor.poller.unregister(leash)\n",
        ),
    ),
    "leaks descriptors of starts that fail": Mutant(
        "What ended leaves nothing behind.",
        "test_starts_and_their_failures_leave_nothing_anywhere",
        (
            "backend.py",
            "        self._requests.put(None)\n        self._connection.close()\n        self._leash.close()\n",
            "        self._requests.put(None)\n        if not self.pid:\n            _kept.append(self)\n        else:\n            self._connection.close()\n            self._leash.close()\n",
        ),
    ),
    "leaks descriptors elsewhere": Mutant(
        "What ended leaves nothing behind.",
        "test_starts_and_their_failures_leave_nothing_anywhere",
        (
            "nursery.py",
            "processes[pid] = connection, leash\n",
            "processes[pid] = connection, leash\n                _kept.append(processes[pid])\n",
        ),
    ),
    "cancels what an end left undone": Mutant(
        "`done` is called once, or never if the process ends first.",
        "test_errors_have_times_and_none_is_answered_for_a_process_that_ended",
        (
            "backend.py",
            "            self._on_death(self._rank, Death(cause, self._log.last_lines()))\n",
            "            self._on_death(self._rank, Death(cause, self._log.last_lines()))\n        for done in self._pending.values():\n            done(Reply('cancelled', pack(None, '')))\n",
        ),
    ),
    "lets requests with arguments of their own be overtaken": Mutant(
        "Requests run in the order of `invoke`.",
        "test_large_and_small_calls_keep_their_order_and_run_once",
        (
            "backend.py",
            "        self._requests.put(request)\n",
            "        if request.own is not None and request.target:\n            return threading.Timer(0.005, self._requests.put, [request]).start()\n        self._requests.put(request)\n",
        ),
    ),
    "takes errors of unwanted results for success": Mutant(
        "A request that raises is answered by an error.",
        "test_an_error_is_heard_where_the_result_is_not_wanted",
        (
            "worker.py",
            "        with sending:\n            send(",
            "        outcome = outcome if wants else outcome._replace(status='ok')\n        with sending:\n            send(",
        ),
    ),
    "counts the bytes of a head in two bytes": Mutant(
        "A value of any size arrives.",
        "test_a_message_of_very_many_parts_arrives_whole",
        ("wire.py", "len(top).to_bytes(4)", "len(top).to_bytes(2)"),
        ("wire.py", "_exactly(connection, 4)", "_exactly(connection, 2)"),
    ),
    "spoils parts of 64 KiB": Mutant(
        "A value of any size arrives.",
        "test_parts_of_every_size_arrive_whole",
        ("wire.py", "    return whole\n", "    if size == 1 << 16:\n        whole[-1] ^= 1\n    return whole\n"),
    ),
    "takes a thousand requests at a time": Mutant(
        "`invoke` does not wait.",
        "test_a_thousand_requests_can_wait",
        ("backend.py", "queue.SimpleQueue()", "queue.Queue(1000)"),
    ),
    "drops requests beyond a thousand": Mutant(
        "`invoke` does not wait.",
        "test_a_thousand_requests_can_wait",
        (
            "backend.py",
            "        self._requests.put(request)\n",
            "        if self._requests.qsize() < 1000:\n            self._requests.put(request)\n",
        ),
    ),
    "ends a second after it is asked to shut down": Mutant(
        "The request to shut down closes the workers.",
        "test_a_worker_may_take_its_time_to_close",
        (
            "worker.py",
            "                process.execute_concurrently(*request) if",
            "                method == 'shutdown' and not target and threading.Timer(1.0, os._exit, [0]).start()\n                process.execute_concurrently(*request) if",
        ),
    ),
    "reports no end after a shutdown": Mutant(
        "`on_death` reports the end of each process that has started, wanted or not.",
        "test_errors_have_times_and_none_is_answered_for_a_process_that_ended",
        (
            "backend.py",
            "        self._requests.put(request)\n",
            "        self._shut = not request.target and request.method == 'shutdown'\n        self._requests.put(request)\n",
        ),
        ("backend.py", "        if self.pid:\n", "        if self.pid and not getattr(self, '_shut', False):\n"),
    ),
    "has no clock for errors": Mutant(
        "A reply has the times at which its request began and ended.",
        "test_errors_have_times_and_none_is_answered_for_a_process_that_ended",
        (
            "backend.py",
            "done(Reply(status, payload, *times))",
            "done(Reply(status, payload, *(times if status == 'ok' else (0, 0))))",
        ),
    ),
    "starts what was interrupted": Mutant(
        "Start is all or nothing.",
        "test_an_interrupted_start_leaves_nothing",
        ("backend.py", "        except BaseException:\n", "        except Exception:\n"),
    ),
    "lives as long as its socket": Mutant(
        "When the controller ends, in whatever way, its worker processes and their children end within seconds.",
        "test_workers_and_their_children_end_with_a_script_that_is_killed",
        (
            "nursery.py",
            "    supervisor.settle()\n",
            "    supervisor.settle()\n    os.getppid = (lambda real, nursery, parent: lambda: parent if os.getpid() == nursery else real())(os.getppid, os.getpid(), os.getppid())\n",
        ),
    ),
    "closes at the end of a fork": Mutant(
        "Worker processes are those of the process that connected.",
        "test_a_fork_of_the_script_that_ends_leaves_the_workers_alone",
        (
            "backend.py",
            "        self.files = Files()\n",
            "        self.files = Files()\n        __import__('atexit').register(lambda: self.close())\n",
        ),
    ),
    "runs each request in a thread of its own": Mutant(
        "Requests run one at a time in one thread.",
        "test_all_requests_run_in_one_thread",
        (
            "worker.py",
            "        done(process.execute(number, target, method, values))\n",
            "        thread = threading.Thread(target=lambda: done(process.execute(number, target, method, values)))\n        thread.start()\n        thread.join()\n",
        ),
    ),
    "keeps requests to what has ended": Mutant(
        "Memory of values is freed with their last user.",
        "test_memory_of_requests_to_what_ended_is_given_back",
        (
            "backend.py",
            "        self._requests.put(None)\n",
            "        self._requests.put(None)\n        _kept.append(self._requests)\n",
        ),
    ),
    "ignores children's ends": Mutant(
        "A backend leaves the script's signals as they are.",
        "test_the_scripts_handlers_of_signals_stay",
        (
            "backend.py",
            "        self.files = Files()\n",
            "        self.files = Files()\n        if threading.current_thread() is threading.main_thread():\n            __import__('signal').signal(__import__('signal').SIGCHLD, lambda *_: None)\n",
        ),
    ),
    "connects in the main thread alone": Mutant(
        "Any thread may call any method.",
        "test_any_thread_may_connect_and_start_and_then_end",
        (
            "backend.py",
            "        self.files = Files()\n",
            "        self.files = Files()\n        if threading.current_thread() is not threading.main_thread():\n            raise ValueError('signal only works in main thread')\n",
        ),
    ),
    "loses large errors": Mutant(
        "A request that raises is answered by an error.",
        "test_an_error_is_heard_where_the_result_is_not_wanted",
        (
            "worker.py",
            "        with sending:\n            send(",
            "        if outcome.status == 'error' and sum(map(len, parcel)) > 1 << 16:\n            parcel = pack(None, '')\n        with sending:\n            send(",
        ),
    ),
    "returns processes in the reverse order": Mutant(
        "`start_processes` returns a process for each spec.",
        "test_an_end_is_reported_without_a_call_and_with_its_cause",
        ("backend.py", "        return processes\n", "        return processes[::-1]\n"),
    ),
    "ends with the thread that connects": Mutant(
        "Any thread may call any method.",
        "test_any_thread_may_connect_and_start_and_then_end",
        (
            "nursery.py",
            "    supervisor.settle()\n",
            "    supervisor.settle()\n    __import__('ctypes').CDLL(None).prctl(1, 9)\n",
        ),
    ),
    "takes descriptors below 1024": Mutant(
        "A script may have thousands of open files.",
        "test_a_script_may_have_thousands_of_open_files",
        (
            "backend.py",
            "            self.pid, _ = receive(self._connection)\n",
            "            __import__('select').select([self._connection], [], [])\n            self.pid, _ = receive(self._connection)\n",
        ),
    ),
    "sorts processes by their names": Mutant(
        "`start_processes` returns a process for each spec.",
        "test_more_than_ten_processes_are_in_the_order_of_their_ranks",
        (
            "backend.py",
            "        return processes\n",
            "        return sorted(processes, key=lambda process: process._log.path)\n",
        ),
    ),
    "waits for its limit where a process ends before": Mutant(
        "A process that does not take requests within `timeout_s` has failed to start.",
        "test_starts_and_their_failures_leave_nothing_anywhere",
        ("backend.py", "        self._ended.set()\n        self.started.set()\n", "        self._ended.set()\n"),
    ),
    "waits for an exit code for ever": Mutant(
        "The end of a process is reported at once.",
        "test_the_end_of_what_serves_the_backend_is_the_end_of_its_processes",
        (
            "backend.py",
            "        code = self._leash.recv(16)\n",
            "        while not (code := self._leash.recv(16)):\n            time.sleep(0.1)\n",
        ),
    ),
    "takes a script that is stopped for one that ended": Mutant(
        "When the controller ends, in whatever way, its worker processes and their children end within seconds.",
        "test_a_script_that_a_signal_stops_keeps_its_workers",
        (
            "nursery.py",
            "            for pid, (_, leash) in processes.items():\n",
            "            if '(stopped)' in open(f'/proc/{os.getppid()}/status').read():\n                break\n            for pid, (_, leash) in processes.items():\n",
        ),
    ),
    "answers at once where no result is wanted": Mutant(
        "`done` is called once, with the reply to its own request.",
        "test_an_error_is_heard_where_the_result_is_not_wanted",
        (
            "backend.py",
            "        self._requests.put(request)\n",
            "        self._requests.put(request)\n        if not request.wants_result and request.target:\n            self._pending.pop(request.number)\n            done(Reply('ok', pack(None, '')))\n",
        ),
    ),
    "draws the same numbers everywhere": Mutant(
        "Each worker process draws random numbers of its own.",
        "test_every_process_draws_random_numbers_of_its_own",
        (
            "worker.py",
            '.settle_in("lo")\n',
            '.settle_in("lo")\n    __import__("torch").default_generator.manual_seed(7)\n',
        ),
    ),
}
