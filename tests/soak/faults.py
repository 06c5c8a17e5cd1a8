"""The faults: what tests/chaos does one at a time, done to one crew again and again, in random order.

A fault returns when its cause is over. Its docstring is its name in the report.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg

from tests.soak.crew import Crew

#: Longer than HEARTBEAT_LIMIT, so that other workers take the tasks.
LONG = 35.0
TERMINATE = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


def connect(crew: Crew) -> psycopg.Connection[Any]:
    """Return a session of a DBA."""
    folder = str(crew.server.folder)
    return psycopg.connect(host=folder, user="postgres", dbname="postgres", autocommit=True, application_name="dba")


def nothing(crew: Crew) -> None:
    """no fault"""
    time.sleep(5)


def kill(crew: Crew) -> None:
    """SIGKILL of a worker"""
    victim = crew.victims[0]
    crew.stage.strike(victim, signal.SIGKILL)
    crew.replace(victim)


def kill_host(crew: Crew) -> None:
    """SIGKILL of two workers and of their heartbeat processes"""
    victims = list(crew.victims)
    crew.stage.kill_heartbeat_processes(*victims)
    for victim in victims:
        crew.stage.strike(victim, signal.SIGKILL)
    for victim in victims:
        crew.replace(victim)


def stop(crew: Crew) -> None:
    """SIGSTOP for longer than HEARTBEAT_LIMIT, then SIGCONT"""
    crew.stage.strike(crew.victims[0], signal.SIGSTOP)
    time.sleep(LONG)
    crew.stage.strike(crew.victims[0], signal.SIGCONT)


def deploy(crew: Crew) -> None:
    """SIGTERM of each worker that is killed, and a new one"""
    for victim in list(crew.victims):
        crew.stage.strike(victim, signal.SIGTERM)
        crew.replace(victim)


def kill_supervised(crew: Crew) -> None:
    """SIGKILL of a process of the supervisor"""
    crew.kill_supervised()


def crash(crew: Crew) -> None:
    """segmentation fault of a worker"""
    victim = crew.victims[1]
    crew.stage.strike(victim, signal.SIGSEGV)
    crew.replace(victim)


def terminate(crew: Crew) -> None:
    """all sessions terminated, again and again for 10 s"""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with closing(connect(crew)) as dba:
            dba.execute(TERMINATE)
        time.sleep(0.5)


def restart(crew: Crew) -> None:
    """immediate restart of PostgreSQL"""
    crew.server.restart("immediate")


def outage(crew: Crew) -> None:
    """outage of PostgreSQL for 15 s"""
    crew.server.halt()
    time.sleep(15)
    crew.server.launch()


def lock_table(crew: Crew) -> None:
    """ACCESS EXCLUSIVE on the tasks for 15 s"""
    with closing(connect(crew)) as dba, dba.transaction():
        dba.execute("LOCK TABLE django_pglock_task IN ACCESS EXCLUSIVE MODE")
        time.sleep(15)


def hold_xmin(crew: Crew) -> None:
    """a transaction that holds xmin back for 60 s"""
    with closing(connect(crew)) as dba:
        dba.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        dba.execute("SELECT count(*) FROM django_pglock_task")
        time.sleep(60)


def take_connections(crew: Crew) -> None:
    """all sessions terminated, and all of max_connections taken for 10 s"""
    with contextlib.ExitStack() as guests:
        with contextlib.suppress(psycopg.OperationalError):
            guests.enter_context(closing(first := connect(crew)))
            first.execute(TERMINATE)
            while True:
                guests.enter_context(closing(connect(crew)))
        time.sleep(10)


def cut(crew: Crew) -> None:
    """connections through the proxy reset ten times, then refused for 5 s"""
    for _ in range(10):
        crew.proxy.cut()
        time.sleep(0.5)
    crew.proxy.cut(new=True)
    time.sleep(5)
    crew.proxy.pass_through()


def swallow(crew: Crew) -> None:
    """connections through the proxy swallowed for longer than HEARTBEAT_LIMIT"""
    began = time.time()
    crew.proxy.black_hole()
    time.sleep(LONG)
    crew.proxy.pass_through()
    crew.stage.out_of_reach(crew.distant.id, began, time.time())


def delay(crew: Crew) -> None:
    """100 ms on each message through the proxy, for 20 s"""
    crew.proxy.delay(0.1)
    time.sleep(20)
    crew.proxy.pass_through()


def half_open(crew: Crew) -> None:
    """a proxy that forgets the connections it has and keeps acknowledging"""
    began = time.time()
    crew.proxy.black_hole(new=False)
    time.sleep(5)
    crew.stage.out_of_reach(crew.distant.id, began, time.time())


FAULTS: tuple[Callable[[Crew], None], ...] = (
    nothing, kill, kill_host, stop, deploy, kill_supervised, crash, terminate, restart, outage, lock_table,
    hold_xmin, take_connections, cut, swallow, delay, half_open,
)  # fmt: skip
