"""Many requests: nothing adds up, and slow ones do not stop those of others."""

from __future__ import annotations

import itertools

from tests.web.cases import on_servers, ways_to
from tests.web.sites import ASGI

#: More than any server here needs, fewer than would be left by a session for each of the clients that vanished.
MOST_SESSIONS = 24
WAYS = (
    *(("plain", "view"), ("stream", "after"), ("stream", "middle")),
    *(("plain_async", "view"), ("stream_async", "after"), ("stream_async", "middle")),
)


@on_servers()
def test_thirty_clients_that_vanish_leave_nothing(visit, observer, site):
    ways, last = ways_to(site.name, WAYS), visit()
    for view, place in itertools.islice(itertools.cycle(ways), 30):
        each = visit()
        click = each.click(view, f"stop={place}")
        each.wait_at(place)
        click.vanish()
        each.open()
    last.until(lambda: not observer.locks_of(site.name), why="locks are left")
    last.until(lambda: observer.sessions_of(site.name) <= MOST_SESSIONS, why="too many sessions are left")
    for view in sorted({view for view, _ in ways}):
        last.expect_success(view)
    last.expect_no_errors()


@on_servers(ASGI)
def test_ten_slow_streams_stop_no_other_view(visit):
    """Neither one under another lock, nor the answer that a lock is busy."""
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
