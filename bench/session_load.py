"""1,000 sessions at once over HTTP, whose calls are answered by one or several processes.

    this process ─ a connection a session ─┬▶ rollout worker 1: service and sessions, one event loop
                                           └▶ rollout worker 2

:mod:`bench.sessions` calls it. Each worker has the event loop of a rollout worker, and the engine answers at once. The
client is a few lines over a socket, so that it takes little beside what it measures.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from podium.rollout.environments import SessionLimits
from podium_agents.environments.client import Client
from podium_agents.environments.runner import live
from podium_serve.gateway import Gateway

__all__ = ["converse", "measure_load"]


async def work(first: int, count: int, turns: int) -> None:
    """Be a rollout worker: say where sessions are and with which keys, and at the end what was recorded."""
    from bench.sessions import ANSWER, make_service

    service, gateway, over = make_service(), Gateway(), asyncio.Event()
    names = [f"s-{number}" for number in range(first, first + count)]

    async def play(task: Any, client: Client) -> float:
        await over.wait()
        return 1.0

    async with gateway.open(service, "s") as address:
        limits = SessionLimits(at_once=count, time_limit_s=1e6)
        living = asyncio.create_task(
            live(play, [{}] * count, range(count), names, service, limits, address=address, key_of=gateway.keys.key_of)
        )
        write_line({"url": address(), "sessions": [(name, gateway.keys.key_of(name)) for name in names]})
        began = time.process_time()
        await asyncio.to_thread(sys.stdin.readline)
        cpu_s = time.process_time() - began
        over.set()
        rows = [row for episode in await living for one in episode.trajectories for row in one.session.rows]
    complete = sum(len(row.turns) == turns and sum(row.sampled) == turns * ANSWER for row in rows)
    write_line({"cpu_s": cpu_s, "whole": complete})
    await asyncio.to_thread(gateway.close)


def write_line(message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def converse(
    url: str, name: str, key: str, turns: int, times: list[float], *, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Have a conversation, and add the seconds of its calls to ``times``."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    said: list[dict[str, Any]] = [{"role": "user", "content": "Which number is it, please?"}]
    for _ in range(turns):
        body = json.dumps({"model": "echo", "messages": said}).encode()
        head = (
            f"POST /sessions/{name}/v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        began = clock()
        writer.write(head.encode() + body)
        status, *fields = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        size = next(int(field.partition(":")[2]) for field in fields if field.lower().startswith("content-length"))
        answer = json.loads(await reader.readexactly(size))
        times.append(clock() - began)
        if " 200 " not in status:
            raise RuntimeError(f"{status}: {answer}")
        said += [answer["choices"][0]["message"], {"role": "user", "content": "Are you sure?"}]
    writer.close()


async def measure_load(workers: int, sessions: int, turns: int) -> dict[str, Any]:
    """Return the row of so many workers: what calls took, how many a second, and what a worker computed for each."""
    share, pipe = sessions // workers, asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "bench.session_load")
    processes = [
        await asyncio.create_subprocess_exec(
            *(*command, str(number * share), str(share), str(turns)), stdin=pipe, stdout=pipe, limit=1 << 24
        )
        for number in range(workers)
    ]

    async def hear(process: asyncio.subprocess.Process) -> Any:
        assert process.stdout is not None
        return json.loads(await process.stdout.readline())

    addresses = [await hear(process) for process in processes]
    began = time.perf_counter()
    flat: list[float] = []
    await asyncio.gather(
        *(converse(worker["url"], name, key, turns, flat) for worker in addresses for name, key in worker["sessions"])
    )
    wall_s = time.perf_counter() - began
    ends: list[Any] = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        await process.stdin.drain()
        ends.append(await hear(process))
        await process.wait()
    flat.sort()
    cpu_ms = 1e3 * sum(end["cpu_s"] for end in ends) / len(flat)
    return {
        "way": f"{share * workers} sessions over HTTP, {workers} rollout worker{'s' * (workers > 1)}",
        "calls": len(flat),
        "lost": share * workers - sum(end["whole"] for end in ends),
        "p50_ms": round(1e3 * statistics.median(flat)),
        "p99_ms": round(1e3 * flat[int(0.99 * len(flat))]),
        "calls_per_s": round(len(flat) / wall_s),
        "cpu_ms_a_call": round(cpu_ms, 2),
        "loop_is_full_at_calls_per_s": round(1e3 / cpu_ms),
    }


if __name__ == "__main__":
    asyncio.run(work(*map(int, sys.argv[1:])))
