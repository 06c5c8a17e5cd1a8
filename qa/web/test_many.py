"""Many requests: they leave no locks or sessions, and slow requests do not block others."""

from __future__ import annotations

import itertools
import time

from qa.web.cases import on_servers, ways_to
from qa.web.sites import ASGI

#: Of the thirty clients half are served by coroutines and half by threads: fewer than a session for each of one half,
#: and more than are kept on purpose: one for each of two times four threads, or up to eleven for coroutines' locks.
#: A pool that earlier tests have filled shrinks by one session a second.
MOST_SESSIONS = 14
WAYS = (
    *(("plain", "view"), ("stream", "after"), ("stream", "middle")),
    *(("plain_async", "view"), ("stream_async", "after"), ("stream_async", "middle")),
)


@on_servers()
def test_thirty_disconnected_clients_leave_no_lock_and_no_session(visit, observer, site):
    ways, last = ways_to(site.name, WAYS), visit()
    for view, place in itertools.islice(itertools.cycle(ways), 30):
        each = visit()
        click = each.click(view, f"stop={place}")
        each.wait_at(place)
        click.vanish()
        each.open()
    last.until(lambda: not observer.locks_of(site.name), why="locks are left")

    def has_few_sessions() -> bool:
        # Under ASGI, Django runs each request's sync code in a thread of its own. A persistent connection that was used
        # there is a part of a reference cycle, so it stays open after its thread until Python collects cycles.
        assert last.get("collect").status == 200
        if observer.sessions_of(site.name) <= MOST_SESSIONS:
            return True
        time.sleep(0.5)  # to collect takes a server more CPU time than to serve a click
        return False

    last.until(has_few_sessions, why="too many sessions are left")
    for view in sorted({view for view, _ in ways}):
        last.expect_success(view)
    last.expect_no_errors()


@on_servers(ASGI)
def test_ten_slow_streams_stop_no_other_view(visit):
    """Neither a view with another lock, nor a 409 response."""
    slow = [visit() for _ in range(10)]
    clicks = [each.click("stream_async", "stop=middle") for each in slow]
    for each in slow:
        each.wait_at("middle")
    other = visit()
    assert other.get("plain_async").status == 200
    assert other.get("stream_async").status == 200
    for each in slow:
        assert each.get("plain_async").status == 409
        each.open()
    assert [click.answer().status for click in clicks] == [200] * 10
    for each in slow:
        each.expect_free()
