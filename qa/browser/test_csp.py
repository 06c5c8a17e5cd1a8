"""The admin in a real browser, under a strict Content-Security-Policy: its console must stay silent."""

from __future__ import annotations

import pytest

from django_pglock.models import Attempt, Task
from qa.browser.chromium import PROGRAM

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.acceptance,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine: apt-get install chromium"),
]


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
