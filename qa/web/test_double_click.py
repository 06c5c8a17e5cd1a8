"""Of two requests at once one is served and one gets 409, on each server, for each kind of view."""

from __future__ import annotations

import pytest

from qa.web.cases import on_servers_with
from qa.web.client import answered
from qa.web.project.views import FILE_SIZE
from qa.web.sites import ALL

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
