"""No thread of a worker waits beside a task that it could run for longer than a claim takes, whatever comes between.

The real feeder, settler, executor and ``InFlight`` (``simulated_process.py``): a claim and a settle take milliseconds,
and between any two lines anything may happen that the other threads can do.
"""

from __future__ import annotations

from contextlib import ExitStack
from random import Random
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.interleaving import by_clock_of
from tests.property.simulated_process import MODULES, SimulatedProcess, replacements
from tests.property.simulation import LONG
from tests.property.table import Call, Shape

SECONDS = st.sampled_from([0.0001, 0.005, 0.02, 0.05, 0.4, 3.0])


def run(shape: Shape, seed: int) -> None:
    """Let a worker run all tasks, in an order that the seed draws."""
    process = SimulatedProcess(Random(seed), shape)
    with ExitStack() as patches:
        for module, name, value in replacements(process):
            patches.enter_context(mock.patch.object(module, name, value))
        patches.enter_context(by_clock_of(process.schedule, *(each for each in MODULES if hasattr(each, "time"))))
        process.schedule.run()
    assert not process.table.ready


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    random = Random(draw(st.integers(0, 2**32)))
    seconds = draw(st.lists(SECONDS, min_size=1, max_size=3))
    keys = draw(st.sampled_from([0, 0, 1, 3]))
    share_async = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    share_refused = draw(st.sampled_from([0.0, 0.0, 0.2]))
    queues = draw(st.sampled_from([["default"], ["a", "b"], ["a=3", "b"], ["a", "b", "empty"]]))
    names = [queue.partition("=")[0] for queue in queues if queue != "empty"]
    count, late = draw(st.integers(1, 25)), draw(st.integers(0, 6))
    calls = [
        Call(
            id=number,
            seconds=random.choice(seconds) * random.uniform(0.5, 1.5),
            is_async=random.random() < share_async,
            lock_key=f"key {random.randrange(keys)}" if keys and number < count else None,
            queue=random.choice(names),
            refusals=random.randint(1, 2) if random.random() < share_refused else 0,
        )
        for number in range(count + late)
    ]
    return Shape(
        threads=draw(st.integers(1, 8)),
        calls=calls[:count],
        late=[(random.choice((0.001, 0.03, 0.3)), call) for call in calls[count:]],
        is_atomic=draw(st.booleans()),
        most_unsettled=draw(st.sampled_from([1, 2, 5, 3000])),
        slowness=draw(st.sampled_from([1, 1, 10])),
        queues=queues,
        is_listening=draw(st.booleans()),
    )


@settings(max_examples=LONG or 35, deadline=None)
@given(shape=shapes(), seed=st.integers(0, 2**32))
def test_no_free_thread_waits_beside_a_ready_task(shape, seed):
    run(shape, seed)
