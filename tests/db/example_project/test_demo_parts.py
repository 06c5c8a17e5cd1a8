"""Parts of the demo: its port, its background threads, its plurals."""

from __future__ import annotations

import http.client
import os
import signal
import sys
import time

import pytest

from example_project.demo.background import Background
from example_project.demo.processes import Fleet, listen
from example_project.demo.screen import counted, times
from tests.conftest import NEVER


def test_two_demos_at_once_have_a_port_each():
    with listen(0) as first:
        port = first.getsockname()[1]
        with listen(port) as second:
            assert second.getsockname()[1] != port


def test_the_server_takes_over_the_port_that_is_held():
    """Between the search for a free port and the start of the server, another program could take the port."""
    with listen(0) as listener:
        port, descriptor = listener.getsockname()[1], listener.fileno()
        fleet = Fleet(
            {"DATABASE_URL": os.environ["DATABASE_URL"], "DJANGO_SETTINGS_MODULE": "example_project.settings"}
        )
        try:
            server = fleet.start("serveshop", str(port), "--fd", str(descriptor), pass_fds=[descriptor])
            # The kernel takes the connection already, and the answer comes when the server has started.
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            connection.request("GET", "/no/such/page/")
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 404, fleet.output()
            connection.close()
            server.send_signal(signal.SIGTERM)
        finally:
            fleet.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no hooks are called around the fork")
def test_ctrl_c_while_a_process_is_started_is_not_lost():
    """The hooks that Python calls around a fork cannot raise KeyboardInterrupt."""
    fleet, forked = Fleet({}), []
    # Another test of this process may have left a handler of its own.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt():
        if not forked:
            forked.append(True)
            signal.raise_signal(signal.SIGINT)

    os.register_at_fork(before=interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            fleet.run(["sleep", "600"])
        assert len(fleet.started) == 1, "nobody would stop it"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
        fleet.stop()
    assert forked


def test_the_child_of_a_process_that_was_killed_does_not_outlive_the_demo(tmp_path):
    """Such a child is a process that a task has started."""
    fleet = Fleet({})
    child = (
        "import sys, time; print('child runs', file=sys.stderr); time.sleep(1); print('child ends', file=sys.stderr)"
    )
    parent = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.DEVNULL, start_new_session=True)
time.sleep(600)
"""
    try:
        process = fleet.run([sys.executable, "-c", parent])
        deadline = time.monotonic() + NEVER
        while "child runs" not in fleet.output():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
        said = tmp_path / "said"
        os.link(fleet.log.name, said)  # the file of the demo is deleted with it
    finally:
        fleet.stop()
    assert "child ends" in said.read_text()


@pytest.mark.django_db(transaction=True)
def test_an_error_in_the_background_is_raised_where_it_is_waited_for(capsys):
    def fail():
        raise LookupError("no such page")

    work = Background(fail)
    with pytest.raises(LookupError, match="no such page"):
        work.finish(60)
    assert capsys.readouterr().err == "", "after Ctrl-C nothing else is printed"


def test_numbers_are_shown_with_singular_or_plural():
    assert [counted(number, "task") for number in (0, 1, 2, 2000)] == ["0 tasks", "1 task", "2 tasks", "2,000 tasks"]
    assert [times(number) for number in (1, 2)] == ["once", "2 times"]
