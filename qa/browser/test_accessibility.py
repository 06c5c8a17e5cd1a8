"""The pages of the admin by the rules of WCAG 2.2, level AA, as axe-core checks them; and as wide as the screen."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from django.db.models.functions import Now

from django_pglock import Lease
from django_pglock.models import Attempt, Event, Queue, Step, Task
from qa.browser.chromium import PROGRAM
from tests.db.store.schedules import of_code

#: The package has axe-core as a file. It is not imported, because it would import a browser of its own.
PACKAGE = find_spec("axe_playwright_python")

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.acceptance,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine: apt-get install chromium"),
    pytest.mark.skipif(PACKAGE is None, reason="tox run -e browser"),
]

#: A name without spaces, longer than a line.
LONG = "example_project.shop.with.a.path.that.is.very.long.indeed.and.longer.function_" + "x" * 40
#: Left out is Django's own markup: head, breadcrumbs, links of filters, and "show all".
CHECK = """
    axe.run(
        {include: [['#content'], ['.pglock-breadcrumbs']],
         exclude: [['#changelist-filter ul'], ['#changelist-filter summary'], ['#changelist-search .quiet']]},
        {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa'], rules: {'target-size': {enabled: true}}}
    ).then(found => found.violations.flatMap(rule => rule.nodes.map(node => `${rule.id}: ${node.html.slice(0, 200)}`)))
"""
#: Other pages of Django, also those of errors, do not load our styles.
#: The button of a group of failures, which leads to the question.
RETRY = ".pglock-inline button"
IS_OURS = "document.querySelector('link[href*=\"django_pglock/admin.css\"]') !== null"
TOO_WIDE = "document.documentElement.scrollWidth - innerWidth"
PLANTED = "<button></button><hr width=3000>"


def violations(browser):
    return browser.evaluate(CHECK)


def test_our_pages_pass_axe_and_fit_the_screen(shop, browser):
    """One browser and one server for all pages: to start them takes seconds."""
    axe = Path(str(PACKAGE.origin)).with_name("axe.min.js").read_text()
    failed = a_failed_task()
    Task.objects.create(queue=LONG, backend="default", task_path=LONG, status="READY", kwargs={"numbers": [*range(99)]})
    Queue.objects.pause(LONG, by="anna", reason="The printer is out of paper.")
    of_code(LONG, "* * * * *", timezone="UTC")
    pages = [
        *("overview/", "task/", "task/?queue=mail", f"task/{failed}/change/", f"task/{failed + 1}/change/"),
        *(f"task/{failed}/attempts/1/", f"task/{a_waiting_task()}/change/", "event/", "event/emit/"),
        *("task/enqueue/?function=example_project.shop.tasks.spend", "failuregroup/", RETRY),
        *("queue/", f"queue/{LONG.replace('_', '_5F')}/change/"),
        *("worker/", "schedule/", "schedule/add/", "lease/", "advisorylock/"),
    ]
    with Lease("report", ttl=3600):
        # The pages with most of our own markup, light and wide.
        for width, dark, visited in ((1280, False, pages[:6]), (400, True, pages)):
            browser.show(width=width, height=800, dark=dark)
            for page in visited:
                if page == RETRY:
                    browser.click(RETRY)
                else:
                    browser.open(f"{shop}/admin/django_pglock/{page}")
                assert browser.evaluate(IS_OURS), page
                browser.evaluate(f"{axe};0")
                assert (page, width, violations(browser)) == (page, width, [])
                assert browser.evaluate(TOO_WIDE) <= 0, (page, width)

    # The checks find a planted error, so an empty list is a result.
    browser.evaluate(f"document.querySelector('#content').insertAdjacentHTML('beforeend', '{PLANTED}')")
    assert "button-name: <button></button>" in violations(browser)
    assert browser.evaluate(TOO_WIDE) > 0


def a_waiting_task():
    """Return the id of a task that waits for an event after a step, all of them with long names."""
    waiting = Task.objects.create(
        queue="mail", backend="default", task_path=LONG, status="SCHEDULED", attempts=1, run_after=Now(),
        started_at=Now(), last_attempted_at=Now(),
    )  # fmt: skip
    about = {"task": waiting, "attempt": 1, "started_at": Now()}
    Step.objects.create(**about, name=LONG, number=1, kind="STEP", finished_at=Now(), result={"text": LONG * 9})
    Step.objects.create(**about, name=f"{LONG}:7", number=2, kind="EVENT", event=f"{LONG}:7")
    Event.objects.create(name=f"{LONG}:6", payload={"text": LONG * 9}, emitted_at=Now(), expires_at=Now())
    return waiting.pk


def a_failed_task():
    """Return the id of a task with a failed attempt, both with long names."""
    failed = Task.objects.create(
        queue="mail",
        backend="default",
        task_path=LONG,
        status="FAILED",
        fingerprint=7,
        attempts=1,
        started_at=Now(),
        finished_at=Now(),
    )
    Attempt.objects.create(
        task=failed, number=1, worker="00000000-0000-0000-0000-000000000001", started_at=Now(), finished_at=Now(),
        outcome="FAILED", exception_path=LONG, traceback=f"Traceback (most recent call last):\n{LONG}: no paper",
    )  # fmt: skip
    return failed.pk
