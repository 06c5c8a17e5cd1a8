"""The options of a worker and their checks. They are the same in Python and on the command line."""

from __future__ import annotations

import re
from typing import Any

from django_pglock.errors import ConfigurationError
from django_pglock.postgres.connections import connection_for
from django_pglock.tasks.backends import database_of_tasks, require_tasks

LAST_PORT = 65535
#: All addresses, because kubelet and Prometheus send requests from outside of the pod. There is no server without a
#: port.
DEFAULT_HOST = "0.0.0.0"  # noqa: S104


#: The numbers by the names of their arguments: the kind, the lowest and the highest.
NUMBERS: dict[str, tuple[type[float], float, float]] = {
    "processes": (int, 1, 64),
    "threads": (int, 1, 1000),
    "grace": (float, 0, 10**9),
    "max_tasks": (int, 1, 10**9),
    "max_memory": (float, 1, 10**9),
}


def probe_address(given: int | str) -> tuple[str, int]:
    """Return the address and the port of ``PORT``, ``ADDRESS:PORT`` or ``[IPV6]:PORT``. Raises ``ValueError``.

    Port 0 means any free port.
    """
    found = re.fullmatch(r"(?:([^\s:\[\]]+|\[[0-9a-fA-F:.]+\]):)?([0-9]{1,5})", str(given))
    if not found or int(found[2]) > LAST_PORT:
        raise ValueError(f"{given!r} is not a port from 0 to {LAST_PORT}, and not ADDRESS:PORT")
    return (found[1] or DEFAULT_HOST).strip("[]"), int(found[2])


def check_options(*, using: str, backend: str | None, probe_port: int | str | None = None, **others: Any) -> None:
    """Raise ``ConfigurationError`` for arguments of ``Worker`` that are invalid or would be ignored."""
    connection_for(using)
    if backend is not None and (database := database_of_tasks(backend, option="using=")) != using:
        raise ConfigurationError(f"Backend {backend!r} stores its tasks in database {database!r}, not in {using!r}.")
    require_tasks(using)
    for name, (kind, lowest, highest) in NUMBERS.items():
        value = others[name]
        is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if value is not None and not (is_number and lowest <= value <= highest):  # nor is NaN
            raise ConfigurationError(f"{name}: {value!r} is not a number from {lowest} to {highest}.")
    if probe_port is not None:
        try:
            probe_address(probe_port)
        except ValueError as error:
            raise ConfigurationError(f"probe_port: {error}.") from error
