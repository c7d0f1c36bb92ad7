"""Calls that wait for their arguments: who is sent when."""

from __future__ import annotations

import threading
import time

import podium
from podium import Worker, endpoint, first
from podium.runtime import Arguments, Split, World, broadcast
from tests.waits import LONG_S

packing, go_on = threading.Event(), threading.Event()


class SlowToSplit(broadcast):
    """Stands still while it splits, as large arguments do."""

    def split(self, arguments: Arguments, world: World) -> Split:
        packing.set()
        assert go_on.wait(LONG_S)
        return super().split(arguments, world)


class Notes(Worker):
    def __init__(self) -> None:
        self.notes: list[str] = []

    @endpoint(collect=first())
    def make(self) -> str:
        time.sleep(0.1)
        return "first"

    @endpoint(dispatch=SlowToSplit())
    def note_slowly(self, text: str) -> None:
        self.notes.append(text)

    @endpoint(collect=first())
    def note(self, text: str) -> list[str]:
        self.notes.append(text)
        return self.notes


def test_nobody_overtakes_a_call_that_waited_while_it_is_packed() -> None:
    packing.clear()
    go_on.clear()
    with podium.connect("inline", threads=True) as cluster:
        producer, consumer = cluster.start(Notes.bind(), name="producer"), cluster.start(Notes.bind(), name="consumer")
        consumer.note_slowly.submit(producer.make.submit().arg())
        assert packing.wait(LONG_S)  # its argument has come, and it is on its way
        threading.Timer(0.2, go_on.set).start()
        assert consumer.note("second") == ["first", "second"]
