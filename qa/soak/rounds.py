"""The rounds of a soak: a fault, the wait until everything is repaired, and the judgement."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing

from django.db import connection

from example_project.postgres import PrivatePostgres
from qa.chaos.experiment import Experiment
from qa.soak.deployment import Deployment
from qa.soak.faults import FAULTS
from qa.soak.judge import Judge
from qa.soak.load import Load
from qa.soak.report import Round
from tests.proxy import Proxy


class Rounds:
    """One soak: it prints a line of JSON for each round."""

    def __init__(self, server: PrivatePostgres, seed: int) -> None:
        self._server = server
        self._seed = seed
        self._judge = Judge()
        self._is_over = False
        self._told: set[str] = set()

    def run(self, seconds: float, every: float) -> list[Round]:
        """Soak for some seconds, with a fault every so many seconds; longer if a fault takes longer."""
        rounds: list[Round] = []
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGTERM, self._stop)
        faults = in_random_order(self._seed)
        # New interpreters, as users have them: forked processes would share memory, and be children of the warm parent.
        experiment = Experiment(self._server, "soak", [], is_short=False, is_forked=False)
        with Proxy(str(self._server.folder)) as proxy, closing(experiment):
            deployment = Deployment(experiment, proxy)
            load = Load(self._seed)
            load.start()
            try:
                end = time.monotonic() + seconds
                while time.monotonic() < end and not self._is_over:
                    began = time.monotonic()
                    rounds.append(self._round(deployment, load, next(faults)))
                    while time.monotonic() < min(began + every, end) and not self._is_over:
                        time.sleep(0.5)
            finally:
                load.stop()
        return rounds

    def _stop(self, *_signal: object) -> None:
        self._is_over = True

    def _round(self, deployment: Deployment, load: Load, fault: Callable[[Deployment], None]) -> Round:
        began = time.time()
        note: Round = {"fault": fault.__doc__, "at": began, "findings": []}
        try:
            fault(deployment)
            over = time.time()
            deployment.wait_until_all_work(over)
            note["repaired"] = time.time() - over
            enqueued = load.take()
            expected, texts = self._judge.judge(enqueued, deployment.experiment)
            note.update(tasks=len(expected), unknown=len(enqueued.unknown), failures=load.failures)
            # The runs of the round before are judged once more, together with those of this round.
            note["findings"] = [text for text in texts if text not in self._told]
            self._told.update(texts)
        except Exception as error:  # the soak continues, and the line of this round shows what happened
            note["findings"] = [f"{type(error).__name__}: {error}"]
            connection.close()
            note["log"] = [line for worker in deployment.workers() for line in worker.lines[-20:]]
        note["seconds"] = time.time() - began
        print(time.strftime("%H:%M:%S"), json.dumps(note), flush=True)
        return note


def in_random_order(seed: int) -> Iterator[Callable[[Deployment], None]]:
    """Yield all faults in random order, then all in another one, and so on."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(FAULTS, len(FAULTS))
