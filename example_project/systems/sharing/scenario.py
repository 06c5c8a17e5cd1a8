"""Shows the system: nodes share rows, fail at some, and are killed; then nodes with wrong clocks report in turn."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from subprocess import Popen
from typing import TypeVar

from django.db import connection, transaction
from django.db.models import Count, F, Max, Min

from django_pglock import LockLost, notify
from django_pglock.models import Lease
from example_project.systems import wrong_clock
from example_project.systems.harness import Harness
from example_project.systems.sharing.models import Report, Result, Row
from example_project.systems.sharing.processing import MOST_ATTEMPTS, run_node
from example_project.systems.sharing.report import LOCK_AT_LEAST_FOR, LOCK_AT_MOST_FOR, write_report

ROWS = 240
#: Values that cannot be processed: Python refuses the first, PostgreSQL the result of the second, which is too long.
POISON = ("no number", "7" * 100)
CLOCKS = {"node 1": 0, "node 2": 3600, "node 3": -3600}
LONGEST = 120.0

Answer = TypeVar("Answer")


def run_scenario(harness: Harness) -> None:
    """Run the system."""
    nodes = share(harness)
    fail(harness, nodes)
    for node in nodes:
        node.terminate()
    take_turns(harness)


def share(harness: Harness) -> list[Popen[bytes]]:
    """Let 1, 2 and 4 nodes share rows; show how fast they are. Return the nodes."""
    harness.say(f"{ROWS} rows arrive, three times. Each takes 5 ms; a node claims 10 at a time.\n")
    harness.say("  nodes   rows/s   speed-up   rows of each node")
    nodes: list[Popen[bytes]] = []
    alone = 0.0
    for count in (1, 2, 4):
        while len(nodes) < count:
            name = f"node {len(nodes) + 1}"
            nodes.append(harness.call(run_node, name, PGAPPNAME=name))
        wait(harness, nodes, lambda: count_sessions("node %") == len(nodes))
        shares, seconds = process_rows(harness, nodes)
        rate = ROWS / seconds
        alone = alone or rate
        harness.say(f"  {count:5}   {rate:6.0f}   {rate / alone:7.1f}x   {'  '.join(map(str, shares))}")
    return nodes


def process_rows(harness: Harness, nodes: list[Popen[bytes]]) -> tuple[list[int], float]:
    """Let rows arrive until each node has had a share; return the shares of the last rows, and their seconds."""
    while True:
        rows = arrive(map(str, range(ROWS)))
        wait(harness, nodes, lambda: not Row.objects.filter(processed=False).exists())
        results = Result.objects.filter(row__gte=rows[0])
        shares = dict(results.order_by("node").values_list("node").annotate(Count("pk")))
        if len(shares) == len(nodes):
            took = results.aggregate(took=Max("made_at") - Min("made_at"))["took"]
            return list(shares.values()), took.total_seconds()


def arrive(data: Iterable[str]) -> list[Row]:
    """Add rows, as another program would, and wake the nodes."""
    with transaction.atomic():
        notify("rows")
        return Row.objects.bulk_create(Row(data=each) for each in data)


def fail(harness: Harness, nodes: list[Popen[bytes]]) -> None:
    """Let rows arrive of which some cannot be processed, and kill a node that holds rows."""
    victim = nodes.pop()

    def holds_rows() -> int:
        if not waiting.exists():
            arrive(str(number) if number % 40 else POISON[number % 80 // 40] for number in range(ROWS))
        return count_sessions("node 4", "AND state = 'idle in transaction' AND backend_xid IS NOT NULL")

    waiting = Row.objects.filter(processed=False, attempts__lt=MOST_ATTEMPTS)
    wait(harness, [victim], holds_rows)
    victim.kill()
    victim.wait()
    wait(harness, nodes, lambda: not waiting.exists())
    aside = Row.objects.filter(processed=False)
    harness.say(
        f"\n{ROWS} more rows arrive, of which {aside.count()} cannot be processed. Node 4 is killed with SIGKILL "
        f"while it\nholds rows; the others process them. Set aside after {MOST_ATTEMPTS} attempts:"
    )
    for error in aside.order_by("error").values_list("error", flat=True).distinct():
        harness.say(f"  {error}")
    harness.claim(
        "Each row that can be processed has exactly one result, also those of the killed node",
        """SELECT count(*) FROM sharing_row AS r WHERE r.data <> ALL (%s)
           AND (NOT processed OR (SELECT count(*) FROM sharing_result WHERE row_id = r.id) <> 1)""",
        list(POISON),
    )
    harness.claim(
        "Each row that cannot be processed was tried three times, and left nothing",
        """SELECT count(*) FROM sharing_row AS r WHERE r.data = ANY (%s)
           AND (processed OR attempts <> 3 OR EXISTS (SELECT FROM sharing_result WHERE row_id = r.id))""",
        list(POISON),
    )


def keep_reporting(node: str) -> None:
    """Try to write a report, again and again; after each one pause, so that another node writes the next."""
    while True:
        with suppress(LockLost):  # the process stood still for longer than the lease lasts
            if write_report(node):
                time.sleep(3 * LOCK_AT_LEAST_FOR)
        time.sleep(0.1)


def take_turns(harness: Harness) -> None:
    """Let nodes with wrong clocks report in turn, and kill the one that reports."""
    harness.say(
        f"\nThree nodes want to write a report: lockAtMostFor is {LOCK_AT_MOST_FOR} s, lockAtLeastFor "
        f"{LOCK_AT_LEAST_FOR} s.\nThe clock of node 2 is an hour fast, the clock of node 3 an hour slow."
    )
    path = str(Path(wrong_clock.__file__).parent)
    nodes = {
        name: harness.call(keep_reporting, name, **({"WRONG_CLOCK": str(offset), "PYTHONPATH": path} if offset else {}))
        for name, offset in CLOCKS.items()
    }
    acquired: set[datetime] = set()

    def have_all_written() -> bool:
        acquired.update(Lease.objects.values_list("acquired_at", flat=True))
        return Report.objects.exclude(ended_at=None).values("node").distinct().count() == len(nodes)

    wait(harness, list(nodes.values()), have_all_written)
    for report in Report.objects.exclude(ended_at=None).order_by("token"):
        harness.say(f"  {report.node} wrote report {report.token}; its clock said {report.clock:%H:%M}")
    killed, expiry = kill_who_reports(harness, nodes)
    followers = Report.objects.filter(token__gt=killed.token).exclude(ended_at=None).order_by("token")
    later = wait(harness, list(nodes.values()), followers.first)
    harness.say(
        f"  {later.node} took over when the lease had expired by the server's clock; its own said {later.clock:%H:%M}"
    )
    claim_exclusion(harness, acquired, killed, expiry)


def kill_who_reports(harness: Harness, nodes: dict[str, Popen[bytes]]) -> tuple[Report, datetime]:
    """Make a report hang for longer than its lease lasts without renewals, then kill its node.

    Return the report, and when the lease expires.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("LOCK TABLE sharing_result IN ACCESS EXCLUSIVE MODE")  # who counts results waits
        hanging = Lease.objects.filter(
            renewed_at__gt=F("acquired_at") + timedelta(seconds=LOCK_AT_MOST_FOR),
            token__in=Report.objects.filter(ended_at=None).values("token"),
        )
        lease = wait(harness, list(nodes.values()), hanging.first)
        report = Report.objects.get(token=lease.token)
        harness.say(
            f"  {report.node} hangs in its report for more than {LOCK_AT_MOST_FOR} s; it lives and keeps its lease"
        )
        node = nodes.pop(report.node)
        node.send_signal(signal.SIGKILL)
        node.wait()
        # If it is another node's meanwhile, what was read before is the least that it lasted.
        lease = Lease.objects.filter(token=lease.token).first() or lease
        harness.say(f"  {report.node} is killed with SIGKILL")
        return report, lease.expires_at


def claim_exclusion(harness: Harness, acquired: set[datetime], killed: Report, expiry: datetime) -> None:
    """Claim what the lock is for."""
    harness.claim(
        "No two reports were written at the same time",
        """SELECT count(*) FROM sharing_report AS a JOIN sharing_report AS b ON a.token < b.token
           WHERE b.began_at < a.ended_at""",
    )
    harness.claim(
        "Nobody took over before the lease of the killed node expired",
        "SELECT count(*) FROM sharing_report WHERE token > %s AND began_at < %s",
        killed.token,
        expiry,
    )
    harness.claim(
        f"Nobody got the lease within {LOCK_AT_LEAST_FOR} s of the one before, although a report takes milliseconds",
        """SELECT count(*) FROM (SELECT t - lag(t) OVER (ORDER BY t) AS gap FROM unnest(%s::timestamptz[]) AS t)
           AS gaps WHERE gap < %s""",
        sorted(acquired),
        timedelta(seconds=LOCK_AT_LEAST_FOR),
    )
    harness.claim(
        "The clocks of two nodes were wrong by an hour",
        """SELECT count(*) FROM (VALUES (interval '1 hour'), (interval '-1 hour')) AS wrong (offs)
           WHERE NOT EXISTS (SELECT FROM sharing_report
                             WHERE abs(extract(epoch FROM clock - began_at - offs)) < 600)""",
    )


def count_sessions(name: str, condition: str = "") -> int:
    """Count the sessions of nodes whose names are like this."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s {condition}", [name])
        return int(cursor.fetchone()[0])


def wait(harness: Harness, nodes: list[Popen[bytes]], question: Callable[[], Answer]) -> Answer:
    """Ask until the answer is true, and return it. Raises ``RuntimeError`` if a node ends before."""
    deadline = time.monotonic() + LONGEST
    while not (answer := question()):
        for node in nodes:
            harness.fleet.require_running(node)
        if time.monotonic() > deadline:
            raise TimeoutError(f"This did not end in time.\n{harness.fleet.output()}")
        time.sleep(0.05)
    return answer
