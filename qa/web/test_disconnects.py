"""A client may disconnect at any moment: the lock is free soon, and the next request is served.

Where the server ends a coroutine because its client is gone, the lock must be free although the view would stop for
much longer. A thread cannot be ended; there the gate opens when the client is gone, and the view runs to its end.
"""

from __future__ import annotations

from qa.web.cases import is_cancelled, on_servers_with

IN_VIEWS = ("before", "view", "after")
IN_STREAMS = ("first", "middle", "end")
PLAIN = [(view, place) for view in ("plain", "plain_async") for place in IN_VIEWS]
TEMPLATES = [(view, place) for view in ("template", "template_class") for place in ("view", "render", "after")]
STREAMS = [(view, place) for view in ("stream", "stream_async") for place in (*IN_VIEWS, *IN_STREAMS)]
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


@on_servers_with("case", [*PLAIN, *TEMPLATES, *STREAMS, *FILES])
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
    visit.until(lambda: observer.waiters(visit.lock), why="the view does not wait for the lock")
    click.vanish()
    if is_cancelled(visit.site.name, view):
        visit.until(lambda: not observer.waiters(visit.lock), why="somebody still waits for the lock")
    observer.free(visit.lock)
    visit.expect_free()
    visit.expect_success(view)
