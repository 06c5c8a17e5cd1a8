"""PgBouncer, for tests. Not every machine has it: ask whether ``PROGRAM`` is None."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from example_project.postgres import account

# Debian keeps it where only root's PATH leads.
PROGRAM = shutil.which("pgbouncer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))

# PgBouncer before 1.20 refuses "options".
CONFIGURATION = """
[databases]
{databases}

[pgbouncer]
listen_addr =
listen_port = 5432
unix_socket_dir = {folder}
auth_type = any
pool_mode = {mode}
ignore_startup_parameters = options, extra_float_digits
logfile = {folder}/log
pidfile = {folder}/pid
"""

# The pipe ends with this process. Then PgBouncer is killed and its folder removed. PgBouncer may be stopped by SIGSTOP.
RUN = '"$1" -q "$2/ini" & read -r end; kill -9 $!; wait; rm -rf "$2"'


class PgBouncer:
    """PgBouncer on a Unix socket in ``folder``. A context manager.

    ``databases`` are its databases by name, each with the way to the server and the size of its pool. A client keeps a
    session for a transaction, or with ``mode="session"`` for as long as it is connected.
    """

    def __init__(self, databases: Mapping[str, str], *, mode: str = "transaction") -> None:
        self.databases = databases
        self.mode = mode
        self.folder = Path()

    def url(self, database: str) -> str:
        """Return the DATABASE_URL of one of its databases."""
        return f"postgres://postgres@/{self.folder}/{database}"

    def __enter__(self) -> PgBouncer:
        self.folder = Path(tempfile.mkdtemp(prefix="pglock-pgbouncer-", dir="/tmp"))
        databases = "\n".join(f"{name} = {way}" for name, way in self.databases.items())
        (self.folder / "ini").write_text(CONFIGURATION.format(databases=databases, folder=self.folder, mode=self.mode))
        self._process = subprocess.Popen(
            ["sh", "-c", RUN, "sh", str(PROGRAM), self.folder],
            stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/", **account(self.folder, self.folder),
        )  # fmt: skip
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to PgBouncer."""
        os.kill(int((self.folder / "pid").read_text()), number)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        while not self._answers():
            assert time.monotonic() < deadline, f"PgBouncer does not answer in {self.folder}"
            time.sleep(0.01)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self.folder / ".s.PGSQL.5432")) == 0


def way_to_server(info: Any) -> str:
    """Return how PgBouncer gets where a psycopg connection is; ``info`` is the connection's."""
    parts = {"host": info.host, "port": info.port, "dbname": info.dbname, "user": info.user, "password": info.password}
    return " ".join("{}='{}'".format(name, str(value).replace("'", "''")) for name, value in parts.items() if value)
