"""The cases: which verbs meet in which world, and where the first of them stops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any
from zlib import crc32

from django.db import connection
from psycopg import Notify

from django_pglock.store import wake
from qa.interleavings.judge import Judge
from qa.interleavings.sessions import (
    COMMIT,
    EACH,
    READ_COMMITTED,
    REPEATABLE_READ,
    ROLL_BACK,
    SessionThread,
    VerbRun,
    interleave,
    swallowed_errors,
    walk,
)
from qa.interleavings.verbs import EVERYWHERE, IN_A_TRANSACTION, VERBS, Results, Verb
from qa.interleavings.worlds import SLEEPING, World


@dataclass(frozen=True)
class Case:
    """Verbs in a world: the first stops at a statement, the others start, and the first continues or dies.

    ``level`` is that of the sessions that are not a worker's.
    """

    world: str
    first: str
    stop_at: int
    ending: str
    others: tuple[str, ...]
    level: str = READ_COMMITTED

    def __str__(self) -> str:
        stop = f"{self.first} ({self.ending} at statement {self.stop_at})"
        return f"{self.world}: {', '.join([stop, *self.others])}; {self.level}"

    @property
    def verbs(self) -> tuple[str, ...]:
        """The names of all its verbs."""
        return (self.first, *self.others)

    def interleave(self, sessions: list[SessionThread], runs: list[VerbRun]) -> bool:
        """Run the verbs; return whether one of them had to wait."""
        runs[0].stop_at = self.stop_at
        return interleave(sessions, runs, self.ending)


@dataclass(frozen=True)
class Walk:
    """Three verbs in a world, whose statements come in an order that the seed draws."""

    world: str
    verbs: tuple[str, ...]
    seed: int
    level: str

    def interleave(self, sessions: list[SessionThread], runs: list[VerbRun]) -> bool:
        """Run the verbs; return whether one of them had to wait."""
        for run in runs:
            run.stop_at = EACH
            # Its transactions stay open, and what others find locked then they leave to upkeep.
            run.gave_up = True
        return walk(sessions, runs, Random(self.seed))


def new_sessions() -> list[SessionThread]:
    """Return the sessions of a case."""
    return [SessionThread(name) for name in ("first", "second", "third")]


class CaseRunner:
    """The sessions that run cases in one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sessions = new_sessions()
        self.blocked = 0
        #: The queues in the notifications of this case.
        self.told: set[str] = set()
        with connection.cursor() as cursor:
            cursor.execute(f"LISTEN {wake.channel_of(SLEEPING)}")
        connection.connection.add_notify_handler(self._on_notification)

    def close(self) -> None:
        """End the sessions."""
        connection.connection.remove_notify_handler(self._on_notification)
        with connection.cursor() as cursor:
            cursor.execute("UNLISTEN *")
        for session in self.sessions:
            session.close()

    def replace_sessions(self) -> None:
        """Replace the sessions, because a case has failed while some of them had not ended."""
        for session in self.sessions:
            session.close()
        self.sessions = new_sessions()

    def record(self, verb: Verb) -> VerbRun:
        """Run a verb alone and note its statements, and which of their transactions have written."""
        self.world.reset()
        results = Results()
        run = VerbRun(lambda: verb.call(self.world, results), is_recording=True)
        self.sessions[0].start(run)
        self.sessions[0].wait_until_ended()
        assert run.error is None, f"{verb.name} in {self.world.name}: {run.error!r}"
        return run

    def record_all(self) -> dict[str, VerbRun]:
        """Return the verbs that do something in this world."""
        runs = {verb.name: self.record(verb) for verb in VERBS.values() if self.world.name in verb.worlds}
        return {name: run for name, run in runs.items() if any(run.writes)}

    def run(self, case: Case | Walk) -> None:
        """Run one case and judge it."""
        wake._no_worker_slept_at.clear()
        self.world.reset()
        self.told.clear()
        results = Results()
        verbs = [VERBS[name] for name in case.verbs]
        runs = [VerbRun(self._bound(verb, results), level=self._level(case, verb)) for verb in verbs]
        with swallowed_errors() as swallowed:
            self.blocked += case.interleave(self.sessions, runs)
        Judge(self.world, results, verbs, self.told).judge(runs, swallowed.errors)

    def _on_notification(self, news: Notify) -> None:
        self.told.add(news.payload.removeprefix(f"{SLEEPING} 0 "))

    def _bound(self, verb: Verb, results: Results) -> Any:
        return lambda: verb.call(self.world, results)

    @staticmethod
    def _level(case: Case | Walk, verb: Verb) -> str:
        return READ_COMMITTED if verb.is_workers else case.level


def pairs(world: str, recorded: dict[str, VerbRun], *, is_short: bool) -> Iterator[Case]:
    """Yield the pairs of the verbs that do something in a world.

    The first stops at each of its statements, and continues or dies there. ``is_short``: each pair in one of the worlds
    that both verbs have, in one of its two orders, at one of the statements, and in half of its forms.
    """
    for first, second in product(recorded, repeat=2):
        if is_short and not (is_forms_turn(first, second) and _is_world_and_order(world, first, second)):
            continue
        yield from _cases(world, first, (second,), recorded[first], is_short=is_short)


def is_forms_turn(first: str, second: str) -> bool:
    """Return whether the short form runs a pair in this form: both inside of a transaction or none, or one of the two.

    Verbs that have one form only are run anyway, and so are those of schedules.
    """
    plain = sorted(name.removesuffix(IN_A_TRANSACTION) for name in (first, second))
    has_forms = any(f"{name}{IN_A_TRANSACTION}" in VERBS for name in plain)
    if not has_forms or VERBS[first].worlds.isdisjoint(EVERYWHERE):
        return True
    return (VERBS[first].is_in_transaction != VERBS[second].is_in_transaction) == bool(_draw(*plain) // 64 % 2)


def is_worlds_turn(world: str, first: str, second: str) -> bool:
    """Return whether the short form runs a pair in this world: in one of theirs."""
    worlds = sorted(VERBS[first].worlds & VERBS[second].worlds)
    return worlds.index(world) == _draw(*sorted((first, second))) % len(worlds)


def _is_world_and_order(world: str, first: str, second: str) -> bool:
    return is_worlds_turn(world, first, second) and _is_order(world, first, second)


def _is_order(world: str, first: str, second: str) -> bool:
    return first == second or _draw(world, *sorted((first, second))) % 2 != (first < second)


def walks(world: str, names: list[str], count: int) -> Iterator[Walk]:
    """Yield a walk of each verb that does something in a world beside itself, and some of any three.

    The same ones each time.
    """
    random = Random(f"walks in {world}")
    for name in names:
        yield Walk(world, (name,) * 3, random.randrange(2**32), READ_COMMITTED)
    for _ in range(count):
        level = random.choice([READ_COMMITTED, REPEATABLE_READ])
        yield Walk(world, tuple(random.choices(names, k=3)), random.randrange(2**32), level)


def _cases(world: str, first: str, others: tuple[str, ...], run: VerbRun, *, is_short: bool) -> Iterator[Case]:
    stops = [(number, COMMIT) for number in stops_of(first, run)]
    stops += [(number, ROLL_BACK) for number, _ in stops if run.writes[number - 1]]
    # At REPEATABLE READ a caller's transaction still sees what it has seen before.
    level = REPEATABLE_READ if any(VERBS[name].is_in_transaction for name in others) else READ_COMMITTED
    for number, ending in [stops[_draw(world, first, *others) // 64 % len(stops)]] if is_short else stops:
        yield Case(world, first, number, ending, others, level)


def _draw(*names: str) -> int:
    return crc32(" ".join(names).encode())


def stops_of(name: str, run: VerbRun) -> list[int]:
    """Return the statements after which others may come in."""
    if VERBS[name].is_in_transaction:
        # Others see nothing of it before its end. What follows the commit is as without the transaction.
        return [max(number for number, has_written in enumerate(run.writes, 1) if has_written)]
    last = len(run.statements)
    return [*range(1, last + 1)] if run.writes[-1] else [*range(1, last)] or [1]
