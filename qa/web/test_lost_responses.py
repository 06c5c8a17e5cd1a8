"""A response that never reaches the client as its view made it frees its lock all the same."""

from __future__ import annotations

import pytest

from qa.web.cases import on_servers_with

RESPONSES = ("plain", "plain_async", "stream", "stream_async", "template", "file")
STREAMS = ("stream", "stream_async")


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
