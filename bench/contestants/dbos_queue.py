"""DBOS Transact for Python: workflows, in a queue without limits; many in one transaction."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from bench.contestants import base
from bench.contestants.base import Contestant, main, repeat


class Dbos(Contestant):
    name = "DBOS"
    packages = ("dbos==3.4.0", "psycopg[binary]")
    slowness = 30
    unfinished = "SELECT FROM dbos.workflow_status WHERE status IN ('ENQUEUED', 'PENDING', 'DELAYED') AND name LIKE %s"


def _url() -> str:
    return "postgresql://postgres@/{PGDATABASE}?host={PGHOST}".format_map(os.environ)


def _setup() -> None:
    from dbos import DBOSClient, run_dbos_database_migrations

    run_dbos_database_migrations(_url())
    client = DBOSClient(system_database_url=_url(), application_name="bench")
    client.register_queue("bench", application_name="bench")
    client.destroy()


def _work() -> None:
    from dbos import DBOS

    DBOS(config={"name": "bench", "system_database_url": _url(), "application_version": "1", "log_level": "ERROR"})
    step = DBOS.step()(base.small)

    def ten_steps() -> None:
        repeat(10, step)

    def fan_in(count: float) -> None:
        queue = DBOS.retrieve_queue("bench")
        children = [queue.enqueue(workflows["nothing"]) for _ in range(int(count))]
        repeat(len(children), lambda: children.pop().get_result())
        base.stamp(time.time())

    functions = (base.nothing, base.sleep, base.stamp, ten_steps, fan_in)
    workflows = {each.__name__: DBOS.workflow(name=each.__name__)(each) for each in functions}
    DBOS.launch()
    threading.Event().wait()


class Client:
    """What enqueues."""

    def __init__(self) -> None:
        import sqlalchemy
        from dbos import DBOSClient

        self.dbos = DBOSClient(system_database_url=_url(), application_name="bench")
        self.engine = sqlalchemy.create_engine(_url().replace("postgresql:", "postgresql+psycopg:"))

    def one(self, function: str, *arguments: Any) -> None:
        self.dbos.enqueue(_options(function), *arguments)

    def many(self, count: int, function: str, *arguments: Any) -> None:
        with self.engine.begin() as connection:
            repeat(count, lambda: self.dbos.enqueue_in_transaction(connection, _options(function), *arguments))


def _options(function: str) -> Any:
    return {"queue_name": "bench", "workflow_name": function, "app_version": "1"}


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        _work()
    elif sys.argv[1] == "setup":
        _setup()
    else:
        client = Client()
        main(setup=lambda: None, one=client.one, many=client.many)
