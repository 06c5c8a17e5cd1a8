"""``breakpoint()`` in a task, under a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from django_pglock.models import Task
from tests.conftest import ROOT, environment_at
from tests.sample import running_tasks

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


@pytest.fixture
def terminal(tmp_path, eventually):
    """A worker under a terminal: its process, its keyboard, and a function that waits for an output."""
    keyboard, end = os.openpty()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "manage.py"), "runlockworker", "--no-reload", "--threads", "1", "--grace", "0.1"],
        env=environment_at(), stdin=end, stdout=end, stderr=end, start_new_session=True,
    )  # fmt: skip
    os.close(end)
    os.set_blocking(keyboard, False)
    output = bytearray()

    def shows(text):
        with suppress(BlockingIOError):
            output.extend(os.read(keyboard, 65536))
        return text in output.decode(errors="replace") and output.decode(errors="replace")

    def wait_for(text):
        return eventually(lambda: shows(text), why=f"no {text!r} was shown")

    yield process, keyboard, wait_for
    process.kill()
    process.wait()
    os.close(keyboard)


def test_a_task_that_is_debugged_has_no_timeout_and_its_process_stays(terminal):
    process, keyboard, wait_for = terminal
    wait_for("is ready")
    made = running_tasks.stop_in_debugger.enqueue(21)
    shown = wait_for("(Pdb)")
    assert f"{Path(running_tasks.__file__).name}" in shown
    assert "child.py" not in shown, "the person is in the function, and not in a frame of the worker"
    time.sleep(4)  # longer than the timeout, the grace period and what the parent adds
    os.write(keyboard, b"p number * 1000003\n")
    wait_for("21000063")
    assert Task.objects.get(pk=made.id).status == "RUNNING"
    os.write(keyboard, b"c\n")
    assert made.wait(60).return_value == 42
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
