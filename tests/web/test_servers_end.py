"""A server process that is killed frees its locks."""

from __future__ import annotations

import os
import signal

from tests.web.cases import on_servers_with


@on_servers_with("case", [("plain", "view"), ("stream", "middle"), ("stream_async", "middle")])
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
