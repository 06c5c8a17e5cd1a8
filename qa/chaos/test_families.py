"""Signals at random moments to any process of a worker: the parent, its starter, and its children."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress

import pytest

from qa.processes import children_of
from qa.soak.faults import TERMINATE
from tests.sql import execute_sql

#: Seconds for which a process is stopped: others do not count the worker as dead before its limit of 8 s.
LONGEST_STOP = 4.0
#: Quick heartbeats, so that the time of a run is enough for many faults.
QUICK = {"HEARTBEAT_INTERVAL": 0.8, "POLL_INTERVAL": 2.0}


def family_of(parent: int) -> list[list[int]]:
    """Return the processes of a worker by kind: parent, starter, children."""
    # It may have ended, or its starter, a moment ago.
    with suppress(ValueError):
        [starter] = children_of(parent)
        return [[parent], [starter], children_of(starter)]
    return [[parent]]


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(OSError):
        os.kill(pid, number)


class Signals:
    """Sends a signal to one process at random. What was stopped continues later."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self._stopped: list[tuple[float, int]] = []

    def hit(self, parent: int) -> None:
        """Kill or stop the parent, its starter or a child."""
        kind = self.draw.choice(family_of(parent))
        if not kind:  # its children are being replaced
            return
        victim = self.draw.choice(kind)
        if self.draw.random() < 0.4:
            send(victim, signal.SIGKILL)
        else:
            send(victim, signal.SIGSTOP)
            self._stopped.append((time.monotonic() + self.draw.uniform(0, LONGEST_STOP), victim))

    def has_stopped(self, parents: list[int]) -> bool:
        """Return whether one of the parents is stopped."""
        return any(pid in parents for _, pid in self._stopped)

    def continue_stopped(self, *, all_: bool = False) -> None:
        """Continue what was stopped for long enough."""
        due = [each for each in self._stopped if all_ or each[0] < time.monotonic()]
        for each in due:
            self._stopped.remove(each)
            send(each[1], signal.SIGCONT)


@pytest.mark.short
@pytest.mark.fault("SIGKILL, SIGSTOP and SIGCONT at random to parents, starters and children")
def test_random_signals(experiment, eventually, is_short):
    seed = int(os.environ.get("CHAOS_SEED", time.time()))
    draw = random.Random(seed)
    signals = Signals(draw)
    workers = experiment.workers(2, "--processes", "3", "--threads", "2", pglock=QUICK)

    def replace_ended() -> None:
        for place, worker in enumerate(workers):
            if worker.process.poll() is not None:
                workers[place] = worker.start_replacement()

    end = time.monotonic() + (20 if is_short else 120)
    look = experiment.under_load(lambda: None)
    while time.monotonic() < end:
        look()
        signals.hit(draw.choice(workers).process.pid)
        # A frozen parent whose session ends is taken for dead after two heartbeats, and its children are not frozen.
        if draw.random() < 0.2 and not signals.has_stopped([each.process.pid for each in workers]):
            execute_sql(TERMINATE)
        time.sleep(draw.uniform(0, 1.0))
        signals.continue_stopped()
        replace_ended()
    signals.continue_stopped(all_=True)
    replace_ended()
    eventually(experiment.is_over, why=f"some task is stuck (CHAOS_SEED={seed})")
    experiment.judge()
    for worker in workers:
        worker.send(signal.SIGTERM)
        code = worker.wait()
        # The last signal may have hit it after the others were replaced: itself, or its starter, without which it ends.
        was_hit = code == -signal.SIGKILL or "starts the worker's children has ended" in worker.output
        assert code == 0 or was_hit, worker.output
