"""The admin in a real browser, under a strict Content-Security-Policy: its console must stay silent."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from django_pglock.models import Attempt, Task

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.acceptance,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"),
]

QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=3000"),
    *("--enable-logging=stderr", "--v=0"),
]


def console_of(url, tmp_path):
    """Return what a browser's console says about a page, and the page as it is after all scripts."""
    visit = subprocess.run(
        [str(CHROMIUM), *QUIET, f"--user-data-dir={tmp_path}", "--dump-dom", url],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return [line for line in visit.stderr.splitlines() if "CONSOLE" in line], visit.stdout


def test_the_check_notices_a_page_that_breaks_the_policy(shop, tmp_path):
    """Without this, a browser that reports nothing at all would look like a clean page."""
    console, page = console_of(f"{shop}/inline/", tmp_path)
    assert "inline" in page
    assert any("Content Security Policy" in line for line in console)


@pytest.mark.parametrize(
    "page",
    [
        *("task/", "task/{id}/change/", "task/{id}/attempts/", "task/{id}/attempts/1/"),
        *("failuregroup/", "worker/", "advisorylock/", "lease/", "overview/"),
    ],
)
def test_our_pages_break_no_rule(shop, tmp_path, page):
    from django.db.models.functions import Now

    row = Task.objects.create(
        queue="default", backend="default", task_path="a.b", status="FAILED", finished_at=Now(), started_at=Now()
    )
    Attempt.objects.create(
        task=row, number=1, worker="00000000-0000-0000-0000-000000000001", started_at=Now(), finished_at=Now(),
        outcome="FAILED", exception_path="x", traceback="y",
    )  # fmt: skip
    console, html = console_of(f"{shop}/admin/django_pglock/{page.format(id=row.pk)}", tmp_path)
    assert "Locks and tasks" in html
    assert console == []
