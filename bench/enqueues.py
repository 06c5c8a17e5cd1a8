"""How fast calls are enqueued, and what one costs by what the task asks for."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from functools import partial

from bench.contestants.base import Contestant
from bench.rounds import OURS, RAW, Bench
from bench.tables import rates_table, verdict

GRAPHILE = "graphile-worker, batched"

CPU_AIMS = {
    *("lock=, a key of its own", "lock=, one key for all", "lock=, in a transaction", "unique=", "after="),
    *("rate=", "rate=, behind others that wait", "rate=, in a transaction", "rate= and lock="),
    "rate= and lock=, in a transaction",
}


def enqueue(bench: Bench) -> list[Sequence[str]]:
    """Enqueue one by one, each in a transaction of its own; raw is an INSERT of the same row (2,000)."""

    def measure(contestant: Contestant) -> float:
        bench.testbed.fresh(contestant).close()
        return bench.tasks / float(bench.testbed.call(contestant, "singles", str(bench.tasks)))

    return rates_table(bench.medians({each.name: partial(measure, each) for each in bench.enter(())}), {RAW: 0.65})


def enqueue_many(bench: Bench) -> list[Sequence[str]]:
    """Enqueue in one call, or the nearest to it that there is; raw is a COPY of the same rows (100,000)."""

    def measure(contestant: Contestant) -> float:
        count = bench.tasks // (10 if contestant.slowness > 1 else 1)
        bench.testbed.fresh(contestant).close()
        return count / float(bench.testbed.call(contestant, "many", str(count)))

    aims = {RAW: 0.25, GRAPHILE: 1.0}
    return rates_table(bench.medians({each.name: partial(measure, each) for each in bench.enter(())}), aims)


def unique(bench: Bench) -> list[Sequence[str]]:
    """Enqueue calls with a unique key each, in one call, against graphile-worker's job keys (100,000)."""

    def measure(contestant: Contestant) -> float:
        bench.testbed.fresh(contestant).close()
        return bench.tasks / float(
            bench.testbed.call(contestant, "keyed", str(bench.tasks), "unique", str(bench.tasks))
        )

    cases = {each.name: partial(measure, each) for each in bench.enter((OURS, GRAPHILE))}
    return rates_table(bench.medians(cases), {GRAPHILE: 1.0})


def cpu(bench: Bench) -> list[Sequence[str]]:
    """CPU time of the server and of the client for one enqueue, by what the task asks for (1,000 calls of each)."""

    def measure() -> dict[str, tuple[float, float]]:
        bench.testbed.fresh(bench.ours).close()
        return json.loads(bench.testbed.call(bench.ours, "cpu", str(bench.tasks)))

    bench.enter((OURS,))
    rounds = bench.measure({"cpu": measure})["cpu"]
    rows: list[Sequence[str]] = [("the task asks for", "server, µs", "of plain", "client, µs", "of plain", "aim")]
    costs = {kind: [statistics.median(each[kind][side] for each in rounds) for side in (0, 1)] for kind in rounds[0]}
    for kind, cost in costs.items():
        plain = costs["nothing, in a transaction" if kind.endswith("in a transaction") else "nothing"]
        ratios = [one / other for one, other in zip(cost, plain, strict=True)]
        aim = verdict(ratios[0] <= 3, "at most 3") if kind in CPU_AIMS else ""
        cells = [cell for one, ratio in zip(cost, ratios, strict=True) for cell in (f"{one:,.0f}", f"{ratio:.1f}")]
        rows.append((kind, *cells, aim))
    return rows
