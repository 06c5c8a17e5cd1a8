"""The requests of one test to one server, and the state of their lock."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from qa.web.client import Answer, Click, answered
from qa.web.observer import Observer
from qa.web.sites import Site
from tests.conftest import NEVER


class Visit:
    """The requests of one test to one server: one address, one lock, one gate."""

    def __init__(self, site: Site, observer: Observer) -> None:
        self.site = site
        self.observer = observer
        self.name = uuid.uuid4().hex
        self.lock = f"web:{self.name}"
        self._clicks: list[Click] = []
        self._errors_before = self._errors()

    def click(self, view: str, query: str = "", **request: Any) -> Click:
        """Send a request for a view and return without an answer."""
        click = Click(self.site.port, f"/{view}/{self.name}/?{query}", **request)
        self._clicks.append(click)
        return click

    def get(self, view: str, query: str = "", **request: Any) -> Answer:
        """Send a request for a view and return its answer."""
        return self.click(view, query, **request).answer()

    def count(self, place: str) -> int:
        """Return the number of requests that have reached a place."""
        try:
            return len((self.site.gates / f"{self.name}.{place}").read_text().split())
        except FileNotFoundError:
            return 0

    def process_at(self, place: str) -> int:
        """Return the number of the process in which a request has come to a place."""
        return int((self.site.gates / f"{self.name}.{place}").read_text().split()[0])

    def wait_at(self, place: str) -> None:
        """Wait until a request has come to a place."""

        def has_come() -> bool:
            self._expect_no_failure()
            return self.count(place) > 0

        self.until(has_come, why=f"no request has come to {place!r}")

    def open(self) -> None:
        """Let stopped requests continue."""
        (self.site.gates / f"{self.name}.open").touch()

    @property
    def is_locked(self) -> bool:
        return self.observer.locks(self.lock) > 0

    def expect_free(self) -> None:
        """Fail if the lock is held too long after its request, or if a session waits for it."""
        self.until(lambda: not self.is_locked, why=f"the lock is held {NEVER:g} s after its request")
        self.until(lambda: not self.observer.waiters(self.lock), why="somebody waits for the lock")

    def expect_success(self, view: str) -> None:
        """Fail if the next request is not served as usual. It may come while the last one is still about to end."""
        self.open()

        def is_served() -> bool:
            status = self.get(view).status
            assert status in (200, 409), f"{status} instead of 200{self._evidence()}"
            return status == 200

        self.until(is_served, why="the next request is refused")

    def expect_no_errors(self) -> None:
        """Fail if the server has written an error to its log since the visit began."""
        new = self._errors()[len(self._errors_before) :]
        assert not new, new

    def until(self, is_true: Callable[[], bool], *, why: str) -> None:
        """Wait until something is true."""
        deadline = time.monotonic() + NEVER
        while not is_true():
            assert time.monotonic() < deadline, why + self._evidence()
            time.sleep(0.01)

    def leave(self) -> None:
        """Let everything end."""
        self.open()
        for click in self._clicks:
            click.close()

    def _expect_no_failure(self) -> None:
        """Do not wait for a request that has failed already."""
        for click in answered([click for click in self._clicks if click.is_open], 0):
            assert click.status < 500, f"{click.status}{self._evidence()}"

    def _evidence(self) -> str:
        return f"\nerrors: {self._errors()[-3000:]}\noutput: {self.site.output.read_text()[-1000:]}"

    def _errors(self) -> str:
        return self.site.errors.read_text() if self.site.errors.exists() else ""
