"""Private servers of a process of tests begin with copies of one cluster, which initdb makes once.

initdb takes eight times as much CPU time as the copy. The first server of a process, which all its tests use, is made
by initdb as elsewhere; most processes have no other.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from example_project import postgres_guard
from example_project.postgres import PrivatePostgres

_initialise = PrivatePostgres._initialise


@cache
def _folder() -> Path:
    """Return the folder of the clusters. If this process is killed, the next start of a server removes it."""
    folder, _lock = postgres_guard.make_folder(in_memory=True)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _copied(server: PrivatePostgres) -> None:
    """Give a server its data: a copy, unless it follows another server or has programs of its own."""
    assert server._programs is not None
    if server._primary is not None or server.home in server._programs.parents:
        _initialise(server)
        return
    cluster = _folder() / str(server._programs).replace(os.sep, "_")
    if cluster.exists():
        copied = (cluster, server._data)
    else:
        _initialise(server)
        copied = (server._data, cluster)
    # It belongs to the user of the server.
    subprocess.run(["cp", "-a", *copied], check=True)


def share() -> None:
    """Copy clusters from here on."""
    PrivatePostgres._initialise = _copied  # type: ignore[method-assign]
