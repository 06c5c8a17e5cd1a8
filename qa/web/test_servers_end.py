"""A server process that is killed frees its locks."""

from __future__ import annotations

import os
import signal

from qa.web.cases import IS_SHORT, on_servers_with
from qa.web.sites import ALL

CASES = [("plain", "view"), ("stream", "middle"), ("stream_async", "middle")]
#: Each way to the database: PostgreSQL or the pooler ends the session of a process that has ended, whatever its
#: program.
#: To start a server again after a kill takes as much CPU time as fifty other tests.
WAYS = ("gunicorn_gthread", "uvicorn_pool", "pgbouncer_session", "pgbouncer_transaction")


@on_servers_with("case", CASES, WAYS if IS_SHORT else ALL)
def test_a_process_that_is_killed_frees_its_lock(visit, site, case):
    view, place = case
    visit = visit()
    visit.click(view, f"stop={place}")
    visit.wait_at(place)
    assert visit.is_locked
    os.kill(visit.process_at(place), signal.SIGKILL)
    try:
        visit.expect_free()
    finally:
        site.revive()
    visit.expect_success(view)
