"""`zeropage env` tells what is here, and which transports can run and why not."""

from __future__ import annotations

import io
import json
import platform
import sys

import pytest
import torch
from rich.console import Console

from zeropage import environment
from zeropage.transport import probe


def test_what_is_found_can_be_written_as_json() -> None:
    found = json.loads(json.dumps(environment.collect().as_dict()))
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["name"] == "cpu"
    assert found["memory"]["available"] <= found["memory"]["total"]
    assert [transport["name"] for transport in found["transports"]] == ["local", "shared", "collective"]


def test_tables_show_every_transport_and_limit() -> None:
    page = io.StringIO()
    Console(file=page, width=120).print(environment.render(environment.collect()))
    for word in ("control group", "/dev/shm", "distributed backends", "local", "shared", "collective"):
        assert word in page.getvalue()


def verdict(name: str) -> probe.TransportVerdict:
    return next(found for found in probe.probe_transports() if found.name == name)


def test_shared_and_collective_run_where_the_tests_do() -> None:
    assert verdict("shared").can_run == (sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64"))
    assert verdict("collective").can_run
    assert "gloo" in verdict("collective").reason


def test_shared_says_which_processor_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not verdict("shared").can_run
    assert "riscv64" in verdict("shared").reason


def test_shared_says_that_memory_files_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_OPEN_IN_CHILD", "raise PermissionError('not yours')")
    assert not verdict("shared").can_run
    assert "not yours" in verdict("shared").reason


def test_collective_says_which_backend_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "backends", lambda: ("mpi",))
    assert not verdict("collective").can_run
    assert "gloo" in verdict("collective").reason
