"""The claims of the demo, checked by SQL. Each claim is a number of violations, which must be zero."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from django.contrib.auth.models import User
from django.db import connection

from example_project.demo.shoppers import SHOPPER

#: The claims, each with the statement that counts its violations.
CLAIMS = [
    (
        "Every task ended successfully",
        "SELECT count(*) FROM django_pglock_task WHERE status <> 'SUCCESSFUL'",
    ),
    (
        "Every task has its effect",
        """SELECT count(*) FROM demo_expected AS e
           WHERE NOT EXISTS (SELECT FROM shop_effect AS s WHERE s.kind = e.kind AND s.number = e.number)""",
    ),
    (
        "No atomic task had its effect twice",
        """SELECT count(*) FROM (SELECT FROM shop_effect WHERE kind IN ('atomic', 'slow')
           GROUP BY kind, number HAVING count(*) > 1) AS twice""",
    ),
    (
        "No cart was charged twice",
        """SELECT count(*) FROM shop_creditentry AS c WHERE c.reason = 'A book about locks'
           AND NOT EXISTS (SELECT FROM shop_order AS o WHERE o.charge_id = c.id)""",
    ),
    (
        "No balance was ever below zero",
        """SELECT count(*) FROM (SELECT sum(amount) OVER (PARTITION BY user_id ORDER BY id) AS balance
           FROM shop_creditentry) AS history WHERE balance < 0""",
    ),
    (
        "Every order has its receipt",
        """SELECT count(*) FROM shop_order AS o
           WHERE NOT EXISTS (SELECT FROM shop_receipt AS r WHERE r.order_id = o.id)""",
    ),
    (
        "No lock was left behind",
        "SELECT count(*) FROM django_pglock_advisorylock WHERE key IS NOT NULL",
    ),
]

LATENCY = """
SELECT COALESCE(percentile_cont(0.5) WITHIN GROUP (ORDER BY wait), 0),
       COALESCE(percentile_cont(0.95) WITHIN GROUP (ORDER BY wait), 0)
FROM (SELECT 1000 * EXTRACT(EPOCH FROM started_at - enqueued_at)::float8 AS wait
      FROM django_pglock_task WHERE started_at IS NOT NULL AND run_after IS NULL) AS waits
"""


@dataclass(frozen=True)
class Finding:
    """A claim and the number of rows that violate it."""

    claim: str
    violations: int

    @property
    def holds(self) -> bool:
        """Whether no row violates the claim."""
        return self.violations == 0

    def as_dict(self) -> dict[str, Any]:
        """Return it for programs."""
        return {**asdict(self), "holds": self.holds}


def expect(kind: str, numbers: range) -> None:
    """Note which effects there must be in the end, independently of the tasks' own table."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE IF NOT EXISTS demo_expected (kind text, number int)")
        cursor.execute(
            "INSERT INTO demo_expected SELECT %s, generate_series(%s, %s)", [kind, numbers.start, numbers.stop - 1]
        )


#: The tables that the demo fills, and whose rows its claims are about.
TABLES = (
    "django_pglock_task, django_pglock_attempt, django_pglock_waiter, "
    "shop_effect, shop_receipt, shop_order, shop_creditentry, shop_product"
)


def is_empty() -> bool:
    """Return whether the tables of the demo are empty, so that it counts and deletes no other rows."""
    with connection.cursor() as cursor:
        return not any(
            _number(cursor, f"SELECT count(*) FROM (SELECT FROM {table} LIMIT 1) AS one") for table in _tables()
        )


def reset() -> None:
    """Empty the demo's tables and remove its shoppers."""
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS demo_expected")
        cursor.execute(f"TRUNCATE {TABLES}")
    User.objects.filter(username__startswith=SHOPPER).delete()


def collect() -> list[Finding]:
    """Ask the database about every claim."""
    with connection.cursor() as cursor:
        return [Finding(claim, _number(cursor, sql)) for claim, sql in CLAIMS]


def latency() -> tuple[float, float]:
    """Return the median and the 95th percentile of the wait from enqueue to start, in milliseconds."""
    with connection.cursor() as cursor:
        cursor.execute(LATENCY)
        p50, p95 = cursor.fetchone()
    return p50, p95


def counts() -> dict[str, int]:
    """Return the number of tasks in each status, and how many were rescued from a dead worker."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT status, count(*) FROM django_pglock_task GROUP BY status")
        found = dict(cursor.fetchall())
        cursor.execute("SELECT count(*) FROM django_pglock_task WHERE rescues > 0")
        found["taken_over"] = cursor.fetchone()[0]
    return found


def _tables() -> list[str]:
    return TABLES.split(", ")


def _number(cursor: Any, sql: str) -> int:
    cursor.execute(sql)
    return int(cursor.fetchone()[0])
