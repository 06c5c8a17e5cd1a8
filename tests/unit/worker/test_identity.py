"""The identity of a worker: one start of one process."""

from __future__ import annotations

import os

import pytest

from django_pglock.models import Worker
from django_pglock.worker import options
from django_pglock.worker.options import Identity


def test_two_starts_in_one_process_are_two_workers():
    """A pod restarts under its name, and often with the same process number."""
    first, second = Identity(), Identity()
    assert (first.hostname, first.pid) == (second.hostname, second.pid)
    assert first.pid == os.getpid()
    assert first.id != second.id
    assert first.name != second.name


@pytest.mark.parametrize("length", [1, 80, 255, 5000])
def test_names_fit_the_table_and_tell_workers_of_one_host_apart(monkeypatch, length):
    monkeypatch.setattr(options.socket, "gethostname", lambda: "h" * length)
    names = {Identity(pid=2**31).name for _ in range(20)}
    assert len(names) == 20
    assert max(map(len, names)) <= Worker._meta.get_field("name").max_length
    assert len(Identity().hostname) <= Worker._meta.get_field("hostname").max_length
