"""How large the demo is. The tests of the demo run a smaller one."""

WORKERS = 4
#: The tasks that are enqueued, of each kind: 2,000 in all.
PLAIN, ATOMIC, LUCKY, SPENDING, SLOW = 1200, 500, 160, 120, 20
CLICKS = 100
SHOPPERS, CARTS = 25, 4
#: Seconds over which the tasks are enqueued, so that the worker is killed while tasks run.
ENQUEUE_OVER = 3.0


def tasks() -> int:
    """Return how many tasks are enqueued."""
    return PLAIN + ATOMIC + LUCKY + SPENDING + SLOW
