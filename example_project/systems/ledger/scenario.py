"""The ledger live: a worker killed behind a charge, racing purchases, busy answers, a refund."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

from django_pglock import lock
from django_pglock.models import Task, Worker
from example_project.systems.harness import Harness
from example_project.systems.ledger.models import Entry
from example_project.systems.web import GUNICORN, Answer, Browser, Site, wait_for

BOOK = "jsonb_to_recordset(%s::jsonb) AS book (id text, kind text, key text, content jsonb)"
OVERDRAWN = """
SELECT count(*) FROM (SELECT sum(amount) OVER (PARTITION BY holder ORDER BY id) AS balance FROM ledger_entry) AS history
WHERE balance < 0
"""
CHARGES = f"""
SELECT count(*) FROM ledger_entry AS e FULL JOIN (SELECT * FROM {BOOK} WHERE kind = 'charge') AS book
    ON e.charge = book.id AND e.holder || ':' || e.key = book.key AND e.amount * 2 = (book.content ->> 'amount')::int
WHERE book.id IS NULL AND e.charge IS NOT NULL OR e.id IS NULL
"""
REFUNDS = f"""
SELECT count(*) FROM (SELECT * FROM ledger_entry WHERE key LIKE 'refund of %%') AS e
    FULL JOIN (SELECT * FROM {BOOK} WHERE kind = 'refund') AS book ON e.key = book.key
WHERE e.id IS NULL OR book.id IS NULL
"""
UNFINISHED = "SELECT count(*) FROM django_pglock_task WHERE status <> 'SUCCESSFUL'"


class Holder(Browser):
    """Somebody who buys and uses credits."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        super().__init__(port)

    @property
    def balance(self) -> int:
        """The credits that there are."""
        return int(Entry.objects.balance_of(self.name))

    def order(self, action: str, amount: int, key: object = None, **headers: str) -> Answer:
        """Buy or use credits."""
        form = {"amount": amount, "key": key or uuid4()}
        return self.post(f"/systems/ledger/{self.name}/{action}/", form, **headers)

    def use(self, amount: int, key: object = None) -> list[int]:
        """Use credits. Try again while the lock is busy; return the status of each answer."""
        answers = [self.order("use", amount, key).status]
        while answers[-1] == 409:
            answers.append(self.order("use", amount, key).status)
        return answers


class Scenario:
    """One run."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.site = Site(harness.fleet)
        self.pool = ThreadPoolExecutor(8)

    def run(self) -> None:
        """Run the parts and ask the database."""
        for _ in range(2):
            self.harness.fleet.start("runlockworker", "--threads=2", "--no-reload")
        [port] = self.site.serve(GUNICORN)
        ann, bob = Holder("ann", port), Holder("bob", port)
        self.buy(ann)
        self.race(ann, bob)
        self.repeat(bob)
        self.busy(ann)
        self.refund(bob)
        self.ask()

    def buy(self, ann: Holder) -> None:
        """Kill the worker that has charged and does not know it yet."""
        self.site.provider.post("/hold")
        status = ann.order("buy", 100).status
        wait_for(self.site.provider.book)
        process = Worker.objects.get(pk=Task.objects.get().worker).pid
        os.kill(process, signal.SIGKILL)
        self.site.provider.post("/release")
        self.harness.say(
            f"ann buys 100 credits ({status}). Worker {process} was killed between the charge and the COMMIT."
        )
        wait_for(lambda: ann.balance)
        [entry] = self.site.provider.book()
        self.harness.say(
            f"The other worker ran the task again. The provider was asked {entry['requests']} times and has charged "
            f"{entry['content']['amount']} once; ann has {ann.balance} credits."
        )

    def race(self, ann: Holder, bob: Holder) -> None:
        """Send four purchases at once, each of which needs the whole balance."""
        bob.order("buy", 100)
        wait_for(lambda: bob.balance)
        with lock("ledger", "ann"):
            purchases = [self.pool.submit(ann.use, 100) for _ in range(4)]
            other = bob.use(30)
        answers = Counter(purchase.result()[-1] for purchase in purchases)
        self.harness.say(
            f"\nFour purchases of 100 credits at once: {answers[201]} x 201, {answers[402]} x 402 (not enough). "
            f"ann has {ann.balance} credits.\n"
            f"While nobody had got the lock of ann yet, bob was served: {other[-1]}."
        )

    def repeat(self, bob: Holder) -> None:
        """Send one request three times, as after a timeout."""
        before, key = bob.balance, uuid4()
        answers = [bob.use(20, key)[-1] for _ in range(3)]
        self.harness.say(
            f"bob's request for 20 was sent three times with one key: {answers}, {before} -> {bob.balance}."
        )

    def busy(self, ann: Holder) -> None:
        """Show both forms of the answer to a busy lock."""
        with lock("ledger", "ann"):
            page = self.pool.submit(ann.order, "use", 1, Accept="text/html")
            detail = self.pool.submit(ann.order, "use", 1, Accept="application/json")
            seen = " - ".join(re.findall("<(?:h1|p)>(.*?)</", page.result().body.decode()))
            read = detail.result().body.decode()
        self.harness.say(
            f"\nFor a second the lock of ann is busy. A browser shows ({page.result().status}):\n    {seen}\n"
            f"A program reads ({detail.result().headers['Content-Type']}):\n    {read}"
        )

    def refund(self, bob: Holder) -> None:
        """Let bob try to give back what he has used, then buy more and give that back, with two clicks."""
        first = Entry.objects.get(holder="bob", charge__isnull=False)
        refused = bob.post(f"/systems/ledger/bob/refund/{first.pk}/").status
        bob.order("buy", 10)
        second = wait_for(Entry.objects.filter(holder="bob", charge__isnull=False).exclude(pk=first.pk).first)
        answers = bob.post_at_once(2, f"/systems/ledger/bob/refund/{second.pk}/")
        wait_for(lambda: any(entry["kind"] == "refund" for entry in self.site.provider.book()))
        self.harness.say(
            f"\nbob asks for the money of 100 credits, of which he has used some: {refused}.\n"
            f"He buys 10, and presses the button for their refund twice: {[answer.status for answer in answers]}; "
            f"he has {bob.balance} credits."
        )

    def ask(self) -> None:
        """Claim what holds."""
        wait_for(lambda: not Task.objects.exclude(status="SUCCESSFUL").exists())
        book = json.dumps(self.site.provider.book())
        self.harness.claim("No balance was ever below zero", OVERDRAWN)
        self.harness.claim("Every charge of the provider is one entry with its credits, and no other is", CHARGES, book)
        self.harness.claim("Every refund of the ledger was paid back by the provider, and no other", REFUNDS, book)
        self.harness.claim("Every task ended successfully", UNFINISHED)
        self.harness.claim_no_lock_is_left()


def run_scenario(harness: Harness) -> None:
    """Run the system."""
    Scenario(harness).run()
