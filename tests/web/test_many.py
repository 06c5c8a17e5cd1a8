"""Many requests: nothing adds up, and slow ones do not stop those of others."""

from __future__ import annotations

import itertools

from tests.web.cases import is_cancelled, on_servers, on_servers_with
from tests.web.sites import ASGI, KINDS

#: More than any server here needs, fewer than would be left by a session for each of the clients that vanished.
MOST_SESSIONS = 24
WAYS = [("plain", "view"), ("stream", "after"), ("stream", "middle"), ("plain_async", "view"),
        ("stream_async", "after"), ("stream_async", "middle")]  # fmt: skip


def ways_of(site):
    kind = KINDS[site]
    return [
        (view, place)
        for view, place in WAYS
        if (kind.has_asyncio or "async" not in view) and not (kind.is_scope_transaction and view == "stream")
    ]


@on_servers()
def test_thirty_clients_that_vanish_leave_nothing(visit, observer, site):
    errors_before = site.errors.read_text()
    for _, (view, place) in zip(range(30), itertools.cycle(ways_of(site.name)), strict=False):
        each = visit()
        click = each.click(view, f"stop={place}")
        each.wait_at(place)
        click.vanish()
        each.open()
    last = visit()
    last.until(lambda: not observer.locks_of(site.name), why="locks are left")
    last.until(lambda: observer.sessions_of(site.name) <= MOST_SESSIONS, why="too many sessions are left")
    for view in {view for view, _ in ways_of(site.name)}:
        last.expect_success(view)
    assert site.errors.read_text() == errors_before


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
