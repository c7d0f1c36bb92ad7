"""Which accelerators a process may use, and how a worker process is shown only its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.backends import process

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def no_visibility(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("0,2,3", ["0", "2", "3"]),
        ("GPU-1a,GPU-2b", ["GPU-1a", "GPU-2b"]),
        (" 1 , 0 ", ["1", "0"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_what_this_process_may_use_is_what_its_variable_says(
    monkeypatch: pytest.MonkeyPatch, variable: str, given: str, expected: list[str]
) -> None:
    monkeypatch.setenv(variable, given)
    assert process.accelerators() == expected


def test_a_worker_process_sees_its_own_by_the_names_that_this_process_knows() -> None:
    """Index 1 of a script that may use devices 4 and 6 is device 6 of the machine."""
    (shown,) = process.visibility((1,), ["4", "6"]).values()
    assert shown == "6"
    (shown,) = process.visibility((0, 2), ["GPU-a", "GPU-b", "GPU-c"]).values()
    assert shown == "GPU-a,GPU-c"


def test_a_worker_process_without_accelerators_sees_none_where_there_are_some() -> None:
    assert set(process.visibility((), ["0", "1"]).values()) == {""}
    assert process.visibility((), []) == {}


def test_the_variable_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for present, variable in (("/dev/kfd", "HIP_VISIBLE_DEVICES"), ("", "CUDA_VISIBLE_DEVICES")):
        monkeypatch.setattr(Path, "exists", lambda path, present=present: str(path) == present)
        monkeypatch.setattr(Path, "glob", lambda path, pattern: iter(()))
        assert process.visibility((0,), ["0"]) == {variable: "0"}
    monkeypatch.setattr(
        Path, "glob", lambda path, pattern: iter([Path("/dev/davinci0")] if "davinci" in pattern else [])
    )
    assert process.visibility((0,), ["0"]) == {"ASCEND_RT_VISIBLE_DEVICES": "0"}
    assert process.accelerators() == ["0"]
