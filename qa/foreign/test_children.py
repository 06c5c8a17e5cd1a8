"""Each child of a worker sends its own events and spans, although SDKs are started when the project is loaded."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from django_pglock.models import Attempt, Task, Worker
from qa.foreign.sample.tasks import fail


class Receiver(BaseHTTPRequestHandler):
    """Notes the requests of Sentry's SDK."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(gzip.decompress(body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def received() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.bodies = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("sends_while_loaded", ["", "1"], ids=["quiet", "sends while it is loaded"])
def test_each_child_sends_its_own_events_and_spans(received: ThreadingHTTPServer, sends_while_loaded: str) -> None:
    environment = {
        **os.environ,
        "SENTRY_DSN": f"http://key@127.0.0.1:{received.server_address[1]}/1",
        "SENDS_WHILE_LOADED": sends_while_loaded,
    }
    options = ("--processes", "2", "--threads", "1", "--skip-checks")
    worker = subprocess.Popen(
        [sys.executable, "-m", "django", "runlockworker", *options],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: Worker.objects.filter(is_sleeping=True).count() == 2)
        while len(results := [*Task.objects.all()]) < 10 or Attempt.objects.values("worker").distinct().count() < 2:
            fail.using(max_attempts=1).enqueue("no luck").wait(60)
    finally:
        worker.send_signal(signal.SIGTERM)
        printed, _ = worker.communicate(timeout=60)
    assert worker.returncode == 0, printed
    # At the end of each child, its SDKs send what they have collected.
    assert len(re.findall(r'"name": "process default"', printed)) == len(results), printed
    events = b"".join(received.bodies)  # type: ignore[attr-defined]
    assert len(set(re.findall(rb'"task_id": ?"(\d+)"', events))) == len(results), printed


def wait_until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
