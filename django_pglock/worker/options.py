"""The options of a worker and their checks. They are the same in Python and on the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from threading import TIMEOUT_MAX
from typing import Any

from django_pglock.errors import ConfigurationError
from django_pglock.postgres.connections import connection_for
from django_pglock.tasks.backends import database_of_backend, database_of_tasks, require_tasks

LAST_PORT = 65535
#: All addresses, because kubelet and Prometheus send requests from outside of the pod. There is no server without a
#: port.
DEFAULT_HOST = "0.0.0.0"  # noqa: S104


def up_to(most: int) -> Callable[[str], int]:
    """Return a function that reads a number from 1 to ``most``, or raises ``ValueError``."""

    def read(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise ValueError(f"{text!r} is not a number from 1 to {most}")
        return int(text)

    return read


def seconds(text: str) -> float:
    """Read seconds, zero or more. Raises ``ValueError``."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= TIMEOUT_MAX:
        raise ValueError(f"{text!r} is not a number of seconds, 0 or larger")
    return number


def amount_of(unit: str) -> Callable[[str], float]:
    """Return a function that reads a number above zero, or raises ``ValueError``."""

    def read(text: str) -> float:
        try:
            number = seconds(text)
        except ValueError:
            number = 0.0
        if not number:
            raise ValueError(f"{text!r} is not a number of {unit} above zero")
        return number

    return read


def probe_address(given: int | str) -> tuple[str, int]:
    """Return the address and the port of ``PORT``, ``ADDRESS:PORT`` or ``[IPV6]:PORT``. Raises ``ValueError``.

    Port 0 means any free port.
    """
    found = re.fullmatch(r"(?:([^\s:\[\]]+|\[[0-9a-fA-F:.]+\]):)?([0-9]{1,5})", str(given))
    if not found or int(found[2]) > LAST_PORT:
        raise ValueError(f"{given!r} is not a port from 0 to {LAST_PORT}, and not ADDRESS:PORT")
    return (found[1] or DEFAULT_HOST).strip("[]"), int(found[2])


def probe_port(text: str) -> str:
    """Return the argument of ``--probe-port``. Raises ``ValueError``."""
    probe_address(text)
    return text


#: The function that reads each number, by the name of its argument.
NUMBERS: dict[str, Callable[[str], float]] = {
    "processes": up_to(64),
    "threads": up_to(1000),
    "grace": seconds,
    "max_tasks": up_to(10**9),
    "max_memory": amount_of("MiB"),
}


def database_to_serve(backend: str | None, *, option: str) -> str:
    """Return the database alias of a worker of one backend or, if ``backend`` is None, of all backends in ``TASKS``.

    Raises ``ConfigurationError`` if there is none or if there are several. ``option`` is what chooses one of several.
    """
    return database_of_tasks(None, option=option) if backend is None else database_of_backend(backend)


def check_options(*, using: str, backend: str | None, probe_port: int | str | None = None, **others: Any) -> None:
    """Raise ``ConfigurationError`` for arguments of ``Worker`` that are invalid or would be ignored."""
    connection_for(using)
    if backend is not None and (database := database_of_backend(backend)) != using:
        raise ConfigurationError(f"Backend {backend!r} stores its tasks in database {database!r}, not in {using!r}.")
    require_tasks(using)
    for name, read in NUMBERS.items():
        if others[name] is not None:
            try:
                # The functions read text. The repr of a number is valid text, and that of any other object is refused.
                read(repr(others[name]))
            except ValueError as error:
                raise ConfigurationError(f"{name}: {error}.") from error
    if probe_port is not None:
        try:
            probe_address(probe_port)
        except ValueError as error:
            raise ConfigurationError(f"probe_port: {error}.") from error
