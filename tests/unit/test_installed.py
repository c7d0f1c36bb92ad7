"""Which libraries can be imported; entry points are read once, and again where a package came or went."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from podium import installed
from podium.installed import has_library, list_entry_points


def install(site: Path, package: str, text: str) -> Path:
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(text)
    return info


def test_they_are_those_of_importlib() -> None:
    groups = ("podium.backends", "podium.commands", "console_scripts", "no.such.group")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for group in groups:
            assert [*list_entry_points(group)] == [*entry_points(group=group)]
        assert [*list_entry_points("console_scripts", name="podium")] == [
            *entry_points(group="console_scripts", name="podium")
        ]


def test_the_metadata_of_packages_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    list_entry_points("podium.backends")
    monkeypatch.setattr(installed, "entry_points", lambda: pytest.fail("it was read again"))
    assert "ray" in list_entry_points("podium.backends").names or list_entry_points("podium.engines")


def test_packages_that_come_and_go_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    assert not list_entry_points("probe.group")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site"), str(tmp_path / "other")])
    assert not list_entry_points("probe.group")
    first = install(tmp_path / "site", "first", "[probe.group]\none = first:one\n")
    assert list_entry_points("probe.group").names == {"one"}
    (tmp_path / "other").mkdir()
    install(tmp_path / "other", "second", "[probe.group]\ntwo = second:two\n")
    assert list_entry_points("probe.group").names == {"one", "two"}
    (first / "entry_points.txt").unlink()
    (first / "METADATA").unlink()
    first.rmdir()
    assert list_entry_points("probe.group").names == {"two"}


def test_a_folder_of_the_name_of_a_library_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("folder_alone", "library_of_a_file", "library_of_a_folder"):
        assert not has_library(name)
    (tmp_path / "folder_alone" / "run-1").mkdir(parents=True)  # as wandb writes one, and as an uninstalled library
    (tmp_path / "library_of_a_file.py").touch()
    (tmp_path / "library_of_a_folder").mkdir()
    (tmp_path / "library_of_a_folder" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert not has_library("folder_alone")
    assert has_library("library_of_a_file") and has_library("library_of_a_folder")
    assert has_library("math") and has_library("json")
