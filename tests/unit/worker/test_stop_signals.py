"""The signals that stop a worker."""

from __future__ import annotations

import signal

import pytest

from django_pglock.worker.worker import stop_signals


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_hang_up_stops_a_worker_unless_nohup_has_it_ignored(handler):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert (signal.SIGHUP in stop_signals()) is (handler is signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
