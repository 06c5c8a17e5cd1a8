"""The faults: what qa/chaos does one at a time, done to one deployment again and again, in random order.

A fault returns when its cause is over. Its docstring is its name in the report.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

import psycopg

from qa.soak.deployment import Deployment
from tests.conftest import session_at, wait_until

#: Longer than the hard limit, so that other workers take the tasks.
LONG = 35.0
TERMINATE = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


def nothing(deployment: Deployment) -> None:
    """no fault"""
    time.sleep(5)


def kill(deployment: Deployment) -> None:
    """SIGKILL of a worker"""
    victim = deployment.victims[0]
    deployment.experiment.send_signal(victim, signal.SIGKILL)
    deployment.replace(victim)


def kill_host(deployment: Deployment) -> None:
    """SIGKILL of two workers, as with their host"""
    victims = list(deployment.victims)
    for victim in victims:
        deployment.experiment.send_signal(victim, signal.SIGKILL)
    for victim in victims:
        deployment.replace(victim)


def stop(deployment: Deployment) -> None:
    """SIGSTOP for longer than the hard limit, then SIGCONT"""
    deployment.experiment.send_signal(deployment.victims[0], signal.SIGSTOP)
    time.sleep(LONG)
    deployment.experiment.send_signal(deployment.victims[0], signal.SIGCONT)


def deploy(deployment: Deployment) -> None:
    """SIGTERM of each worker that is killed, and a new one"""
    for victim in list(deployment.victims):
        deployment.experiment.send_signal(victim, signal.SIGTERM)
        deployment.replace(victim)


def kill_child(deployment: Deployment) -> None:
    """SIGKILL of a child"""
    deployment.kill_child()


def crash(deployment: Deployment) -> None:
    """segmentation fault of a child"""
    victim = deployment.victims[1]
    count = len(victim.children)
    os.kill(victim.child, signal.SIGSEGV)
    wait_until(lambda: len(victim.children) > count, "the child was not replaced")


def terminate(deployment: Deployment) -> None:
    """all sessions terminated, again and again for 10 s"""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with session_at(deployment.server) as dba:
            dba.execute(TERMINATE)
        time.sleep(0.5)


def restart(deployment: Deployment) -> None:
    """immediate restart of PostgreSQL"""
    deployment.server.restart("immediate")


def outage(deployment: Deployment) -> None:
    """outage of PostgreSQL for 15 s"""
    deployment.server.halt()
    time.sleep(15)
    deployment.server.launch()


def lock_table(deployment: Deployment) -> None:
    """ACCESS EXCLUSIVE on the tasks for 15 s"""
    with session_at(deployment.server) as dba, dba.transaction():
        dba.execute("LOCK TABLE django_pglock_task IN ACCESS EXCLUSIVE MODE")
        time.sleep(15)


def hold_xmin(deployment: Deployment) -> None:
    """a transaction that holds xmin back for 60 s"""
    with session_at(deployment.server) as dba:
        dba.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        dba.execute("SELECT count(*) FROM django_pglock_task")
        time.sleep(60)


def take_connections(deployment: Deployment) -> None:
    """all sessions terminated, and all of max_connections taken for 10 s"""
    with contextlib.ExitStack() as clients:
        with contextlib.suppress(psycopg.OperationalError):
            clients.enter_context(first := session_at(deployment.server))
            first.execute(TERMINATE)
            while True:
                clients.enter_context(session_at(deployment.server))
        time.sleep(10)


def cut(deployment: Deployment) -> None:
    """connections through the proxy reset ten times, then refused for 5 s"""
    for _ in range(10):
        deployment.proxy.cut()
        time.sleep(0.5)
    deployment.proxy.cut(new=True)
    time.sleep(5)
    deployment.proxy.pass_through()


def swallow(deployment: Deployment) -> None:
    """connections through the proxy swallowed for longer than the hard limit"""
    began = time.time()
    deployment.proxy.black_hole()
    time.sleep(LONG)
    deployment.proxy.pass_through()
    deployment.experiment.out_of_reach(deployment.distant.id, began, time.time())


def delay(deployment: Deployment) -> None:
    """100 ms on each message through the proxy, for 20 s"""
    deployment.proxy.delay(0.1)
    time.sleep(20)
    deployment.proxy.pass_through()


def half_open(deployment: Deployment) -> None:
    """a proxy that forgets the connections it has and keeps acknowledging"""
    began = time.time()
    deployment.proxy.black_hole(new=False)
    time.sleep(5)
    deployment.experiment.out_of_reach(deployment.distant.id, began, time.time())


FAULTS: tuple[Callable[[Deployment], None], ...] = (
    nothing, kill, kill_host, stop, deploy, kill_child, crash, terminate, restart, outage, lock_table,
    hold_xmin, take_connections, cut, swallow, delay, half_open,
)  # fmt: skip
