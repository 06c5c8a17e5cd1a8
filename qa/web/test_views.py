"""Locked views behind real servers: clicks at once, clients that disconnect, lost responses, servers that end."""

from __future__ import annotations

import itertools
import os
import signal
import time

import pytest

from qa.web.cases import IS_SHORT, is_cancelled, on_servers, on_servers_with, ways_to
from qa.web.client import answered
from qa.web.project.views import FILE_SIZE
from qa.web.sites import ALL, ASGI

VIEWS = ("plain", "plain_async", "stream", "stream_async", "template", "template_class", "file")


STREAMS = ("stream", "stream_async")


def expect_refusal(answer):
    assert (answer.status, answer.headers.get("Retry-After")) == (409, "1")


@on_servers_with("view", VIEWS)
def test_of_two_clicks_one_is_served_and_one_is_refused(visit, view):
    """Both are sent at once. The gate opens when one is refused, so the other one holds the lock all the time."""
    visit = visit()
    clicks = [visit.click(view, "stop=view") for _ in range(2)]
    refused = answered(clicks, 60)[0]
    expect_refusal(refused.answer())
    visit.open()
    clicks.remove(refused)
    assert clicks[0].answer().status == 200
    assert visit.count("view") == 1, "the view ran once"
    visit.expect_free()
    visit.expect_success(view)


@pytest.mark.parametrize("place", ["first", "middle", "end"])
@on_servers_with("view", STREAMS)
def test_a_stream_keeps_others_out_until_its_end(visit, view, place):
    visit = visit()
    click = visit.click(view, f"stop={place}")
    visit.wait_at(place)
    expect_refusal(visit.get(view))
    visit.open()
    assert click.answer().status == 200
    visit.expect_free()
    visit.expect_success(view)


# daphne takes the whole file into its memory, and the response is over.
@on_servers_with("view", ["file"], [name for name in ALL if not name.startswith("daphne")])
def test_a_file_keeps_others_out_while_it_is_sent(visit, view):
    visit = visit()
    click = visit.click(view)
    assert click.status == 200
    expect_refusal(visit.get(view))
    assert len(click.answer().body) == FILE_SIZE
    visit.expect_free()


# A client may disconnect at any moment: the lock is free soon, and the next request is served.


IN_VIEWS = ("before", "view", "after")


IN_STREAMS = ("first", "middle", "end")


PLAIN = [(view, place) for view in ("plain", "plain_async") for place in IN_VIEWS]


TEMPLATES = [(view, place) for view in ("template", "template_class") for place in ("view", "render", "after")]


PLACES_OF_STREAMS = [(view, place) for view in ("stream", "stream_async") for place in (*IN_VIEWS, *IN_STREAMS)]


FILES = [("file", place) for place in ("view", "after")]


GZIP = {"headers": {"Accept-Encoding": "gzip"}}


def vanish(visit, click, view):
    """Disconnect. Then let the view continue, or check that the lock is free before."""
    click.vanish()
    if is_cancelled(visit.site.name, view):
        visit.expect_free()
    visit.open()
    visit.expect_free()
    visit.expect_success(view)


@on_servers_with("case", [*PLAIN, *TEMPLATES, *PLACES_OF_STREAMS, *FILES])
def test_a_client_that_disconnects_at_a_given_place_frees_the_lock(visit, case):
    view, place = case
    visit = visit()
    click = visit.click(view, f"stop={place}")
    visit.wait_at(place)
    vanish(visit, click, view)


@on_servers_with("case", [(view, place) for view in ("stream", "stream_async") for place in ("after", *IN_STREAMS)])
def test_a_client_that_disconnects_from_a_compressed_stream_frees_the_lock(visit, case):
    view, place = case
    visit = visit()
    click = visit.click(view, f"stop={place}", **GZIP)
    visit.wait_at(place)
    vanish(visit, click, view)


@on_servers_with("view", ["plain", "plain_async", "stream", "stream_async"])
def test_a_client_that_disconnects_before_its_request_is_complete_frees_the_lock(visit, view):
    visit = visit()
    visit.click(view, method="POST", body_missing=1000).vanish()
    visit.expect_free()
    visit.expect_success(view)


@on_servers_with("view", ["file"])
def test_a_client_that_disconnects_in_the_middle_of_a_file_frees_the_lock(visit, view):
    visit = visit()
    click = visit.click(view)
    assert click.status == 200
    vanish(visit, click, view)


@on_servers_with("view", ["stream", "stream_async"])
def test_a_client_that_disconnects_after_the_whole_response_frees_the_lock(visit, view):
    visit = visit()
    click = visit.click(view)
    assert click.read().status == 200
    vanish(visit, click, view)


@on_servers_with("view", ["waits", "waits_async"])
def test_a_client_that_disconnects_while_its_view_waits_takes_no_lock(visit, observer, view):
    """A coroutine must stop waiting. A thread continues, and releases the lock when it gets it."""
    visit = visit()
    observer.take(visit.lock)
    click = visit.click(view)
    visit.until(lambda: observer.waits_or_polls(visit.lock), why="the view does not wait for the lock")
    click.vanish()
    if is_cancelled(visit.site.name, view):
        visit.until(lambda: not observer.waits_or_polls(visit.lock), why="somebody still waits for the lock")
    observer.free(visit.lock)
    visit.expect_free()
    visit.expect_success(view)


# A response that never reaches the client as its view made it frees its lock all the same.


RESPONSES = ("plain", "plain_async", "stream", "stream_async", "template", "file")


def expect_all_well(visit, view):
    visit.expect_free()
    visit.expect_success(view)
    visit.expect_free()


@on_servers_with("view", STREAMS)
def test_a_stream_answered_with_304_frees_its_lock(visit, view):
    """ConditionalGetMiddleware puts a response without content in its place and does not close the stream."""
    visit = visit()
    answer = visit.get(view, headers={"If-Modified-Since": "Sun, 06 Nov 2044 08:49:37 GMT"})
    assert answer.status == 304
    expect_all_well(visit, view)


@pytest.mark.parametrize(("how", "status"), [("raise", 403), ("replace", 202)])
@on_servers_with("view", RESPONSES)
def test_a_response_that_middleware_drops_frees_its_lock(visit, view, how, status):
    visit = visit()
    assert visit.get(view, f"drop={how}").status == status
    expect_all_well(visit, view)


@on_servers_with("view", STREAMS)
def test_a_compressed_stream_frees_its_lock_at_its_end(visit, view):
    """GZipMiddleware puts a generator of its own around the stream."""
    visit = visit()
    click = visit.click(view, "stop=middle", headers={"Accept-Encoding": "gzip"})
    visit.wait_at("middle")
    assert visit.is_locked
    visit.open()
    answer = click.answer()
    assert (answer.status, answer.headers["Content-Encoding"]) == (200, "gzip")
    expect_all_well(visit, view)


@on_servers_with("view", [*STREAMS, "file"])
def test_a_head_request_for_a_stream_frees_its_lock(visit, view):
    visit = visit()
    assert visit.get(view, method="HEAD").status == 200
    expect_all_well(visit, view)


# Many requests: they leave no locks or sessions, and slow requests do not block others.


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


# A server process that is killed frees its locks.


CASES = [("plain", "view"), ("stream", "middle"), ("stream_async", "middle")]


#: Each way to the database: PostgreSQL or the pooler ends the session of a process that has ended, whatever its
#: program.
#: To start a server again after a kill takes as much CPU time as fifty other tests.
WAYS_OF_POOLS = ("gunicorn_gthread", "uvicorn_pool", "pgbouncer_session", "pgbouncer_transaction")


@on_servers_with("case", CASES, WAYS_OF_POOLS if IS_SHORT else ALL)
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
