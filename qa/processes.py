"""What the server and the kernel say of the processes of a worker."""

from __future__ import annotations

from http.client import HTTPConnection
from pathlib import Path

from tests.conftest import NEVER
from tests.sql import execute_sql

SESSIONS = """
SELECT application_name, pid FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""


def sessions(prefix: str = "") -> list[tuple[str, int]]:
    """Return name and process of each session of clients in this database but for the one that asks."""
    return [(name, pid) for name, pid in execute_sql(SESSIONS) if name.startswith(prefix)]


def children_of(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def parent_of(pid: int) -> int:
    """Return the parent of a process: of a child that is a fork, that is the process that forks the children."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def lives(pid: int) -> bool:
    """Return whether a process runs, or is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # also if it ends while it is read
        return False


def readiness(port: int) -> tuple[int, str]:
    """Return status and text of the answer of a worker's probe."""
    client = HTTPConnection("127.0.0.1", port, timeout=NEVER)
    try:
        client.request("GET", "/readyz")
        answer = client.getresponse()
        return answer.status, answer.read().decode()
    finally:
        client.close()
