"""The overview in a real browser: it refreshes, stays where the reader is, and fits a phone. The button of a queue."""

from __future__ import annotations

import pytest

from django_pglock.models import Attempt, Queue, Task
from qa.browser.chromium import PROGRAM

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.acceptance,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine: apt-get install chromium"),
]


NEWS = "document.getElementById('pglock-news').textContent"


BUTTON = "document.getElementById('pglock-pause').textContent"


FOCUSED = "document.activeElement.getAttribute('href') || document.activeElement.id"


def press(browser, key, code):
    for kind in ("rawKeyDown", "char", "keyUp"):
        text = {"text": "\r"} if (key, kind) == ("Enter", "char") else {}
        browser.do("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)


def test_the_overview_refreshes_announces_new_problems_and_keeps_the_focus(shop, browser, eventually):
    browser.open(f"{shop}/admin/django_pglock/overview/?trusted=1")
    assert "No worker is running" in browser.text
    browser.evaluate("document.querySelector('#pglock-overview a').focus()")
    first = browser.evaluate(FOCUSED)
    Queue.objects.pause("mail", by="anna")
    eventually(lambda: "Queue mail has been paused for" in browser.text)
    assert "Queue mail has been paused" in browser.evaluate(NEWS)
    assert "No worker" not in browser.evaluate(NEWS), "it has been there before"
    assert browser.evaluate(FOCUSED) == first

    browser.evaluate("history.replaceState(null, '', '/admin/nowhere/')")
    eventually(lambda: "out of date" in browser.evaluate(NEWS))


def test_the_overview_fits_each_screen_and_the_keyboard_stops_its_refresh(shop, browser):
    """One browser and one server for all of this: to start them takes seconds."""
    Queue.objects.pause("a-queue-with-a-name-that-is-much-longer-than-the-screen-of-a-phone-" + "x" * 50)
    address = f"{shop}/admin/django_pglock/overview/"
    for width, dark in ((1280, False), (1280, True), (400, True), (400, False)):
        browser.show(width=width, height=800, dark=dark)
        browser.open(address)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(18, 18, 18)" if dark else "rgb(255, 255, 255)")

    browser.evaluate("document.querySelector('.pglock-refresh a').focus()")
    press(browser, "Tab", 9)
    assert browser.evaluate(FOCUSED) == "pglock-pause"
    assert browser.evaluate(BUTTON) == "Pause automatic refresh"
    press(browser, "Enter", 13)
    assert browser.evaluate(BUTTON) == "Refresh every 5 seconds"
    press(browser, "Tab", 9)
    assert "/worker/" in browser.evaluate(FOCUSED), "the first problem is next"

    browser.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    browser.open(address)
    assert browser.evaluate(BUTTON) == "Refresh every 5 seconds", "less motion means no refresh at first"


def test_a_queue_without_a_row_is_paused_by_its_button(shop, browser):
    """Django's list is a form, in which the button may not have a form of its own."""
    browser.open(f"{shop}/admin/django_pglock/queue/")
    browser.click(".pglock-queues button")
    assert "1 queue was paused." in browser.text
    assert Queue.objects.paused().count() == 1


# The admin in a real browser, under a strict Content-Security-Policy: its console must stay silent.


def console_of(browser, url):
    """Return what the console says about a page in its first three seconds, and the page as it is then.

    A browser asks once for an icon that no page names, and the shop has none.
    """
    browser.watch_console()
    browser.open(url)
    browser.let_time_pass(3)
    console = [entry for entry in browser.console if not entry.get("entry", {}).get("url", "").endswith("/favicon.ico")]
    return console, browser.evaluate("document.documentElement.outerHTML")


def test_the_check_notices_a_page_that_breaks_the_policy(shop, browser):
    """Without this, a browser that reports nothing at all would look like a clean page."""
    console, page = console_of(browser, f"{shop}/inline/")
    assert "inline" in page
    assert any("Content Security Policy" in str(entry) for entry in console)


@pytest.mark.parametrize(
    "page",
    [
        *("task/", "task/{id}/change/", "task/{id}/attempts/1/"),
        *("failuregroup/", "worker/", "advisorylock/", "lease/", "overview/"),
    ],
)
def test_our_pages_break_no_rule(shop, browser, page):
    from django.db.models.functions import Now

    row = Task.objects.create(
        queue="default", backend="default", task_path="a.b", status="FAILED", finished_at=Now(), started_at=Now()
    )
    Attempt.objects.create(
        task=row, number=1, worker="00000000-0000-0000-0000-000000000001", started_at=Now(), finished_at=Now(),
        outcome="FAILED", exception_path="x", traceback="y",
    )  # fmt: skip
    console, html = console_of(browser, f"{shop}/admin/django_pglock/{page.format(id=row.pk)}")
    assert "Background tasks and locks" in html
    assert console == []
