"""A service: the thread of one part of a worker."""

from __future__ import annotations

import threading

from django_pglock.worker.service import Service


class Waiting(Service):
    def run_once(self) -> None:
        self.stopping.wait()


def test_a_service_that_is_about_to_start_is_not_missing(monkeypatch):
    """The watchdog starts with the first task that has a timeout, while another thread checks for missing services."""
    service, seen, start = Waiting(), [], threading.Thread.start

    def look_and_start(thread):
        seen.append(service.is_missing)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", look_and_start)
    service.start()
    assert (seen, service.is_running, service.is_missing) == ([False], True, False)
    service.stop()
    assert service.wait(60)
    assert not service.is_missing
