"""The limits of a worker process: tasks, memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from django_pglock.worker.child import in_flight as limits_module
from django_pglock.worker.child.in_flight import InFlight, Limits, resident_memory


def limits(in_flight=None, **limits):
    return Limits(in_flight or InFlight(1), **{"max_memory": None, **limits})


def test_the_memory_limit_is_checked_after_the_first_task():
    in_flight = InFlight(1)
    assert resident_memory() > 5 * 2**20
    assert not limits(in_flight, max_memory=1).reached()
    in_flight.threads.slots[0].ended = 1
    assert "MiB" in limits(in_flight, max_memory=1).reached()
    assert not limits(in_flight, max_memory=10**6).reached()


def test_the_limit_of_memory_is_in_mebibytes(monkeypatch):
    in_flight = InFlight(1)
    in_flight.threads.slots[0].ended = 1
    monkeypatch.setattr(limits_module, "resident_memory", lambda: 300 * 2**20)
    assert limits(in_flight, max_memory=300).reached() == ""
    assert limits(in_flight, max_memory=299).reached() == "it uses 300 MiB of memory"


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("freebsd14", 1024)])
def test_where_the_system_does_not_show_it_the_peak_is_taken(monkeypatch, platform, unit):
    """getrusage() counts in bytes on macOS, in kibibytes elsewhere."""

    def missing(path):
        raise FileNotFoundError(path)

    resource = pytest.importorskip("resource")
    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5000))
    monkeypatch.setattr(limits_module.sys, "platform", platform)
    assert resident_memory() == 5000 * unit
