"""``enqueue_on_commit()`` in all nestings of the transactions of three databases.

The model knows nothing of transactions: each call also writes a row into every database that is in a transaction. At
the end the task exists if and only if all these rows do.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.db import connection, connections, transaction
from hypothesis import example, given
from hypothesis import strategies as st

from django_pglock.models import Task
from django_pglock.postgres.sessions import dedicated_connection
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)

#: The tasks are in the database "default", which is neither the first nor the last of ``DATABASES``.
ALIASES = ("before", "default", "behind")


@dataclass(frozen=True)
class Block:
    """A block of ``atomic()``, or a function after the commit. ``end`` says how it is left."""

    alias: str
    body: tuple[Block | None, ...]
    kind: str = "atomic"
    end: str = "commit"


CALL = None


def block(alias, *body, **options):
    return Block(alias, body, **options)


KINDS = st.sampled_from(["atomic", "atomic", "durable", "no savepoint", "on_commit", "robust on_commit"])
ENDS = st.sampled_from(["commit", "commit", "raise", "set_rollback"])


def _blocks(inner: Any) -> Any:
    bodies = st.lists(inner, min_size=1, max_size=3).map(tuple)
    return st.builds(Block, st.sampled_from(ALIASES), bodies, KINDS, ENDS)


PROGRAMS = st.lists(st.recursive(st.just(CALL), _blocks, max_leaves=5), min_size=1, max_size=3)


class Undone(Exception):
    """Leaves a block."""


@dataclass
class Run:
    """A program that is executed, and the databases in which each of its calls has written a row."""

    written: dict[int, list[str]] = field(default_factory=dict)

    def steps(self, program: Any) -> None:
        for step in program:
            if step is CALL:
                self.call()
            elif "on_commit" in step.kind:
                self.hook(step)
            else:
                self.block(step)

    def call(self) -> None:
        open_ = [alias for alias in ALIASES if connections[alias].in_atomic_block]
        if any(connections[alias].needs_rollback for alias in open_):
            return
        number = len(self.written)
        self.written[number] = open_
        for alias in open_:
            with connections[alias].cursor() as cursor:
                cursor.execute("INSERT INTO written VALUES (%s, %s)", [number, alias])
        tasks.echo.enqueue_on_commit(number)

    def hook(self, step: Block) -> None:
        transaction.on_commit(lambda: self.steps(step.body), using=step.alias, robust="robust" in step.kind)

    def block(self, step: Block) -> None:
        is_durable = step.kind == "durable" and not connections[step.alias].in_atomic_block
        try:
            with transaction.atomic(step.alias, savepoint=step.kind != "no savepoint", durable=is_durable):
                self.steps(step.body)
                if step.end == "raise":
                    raise Undone
                if step.end == "set_rollback":
                    transaction.set_rollback(True, using=step.alias)
        except Undone:
            pass

    def judge(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT number, alias FROM written")
            rows = set(cursor.fetchall())
        expected = [number for number, aliases in self.written.items() if {(number, each) for each in aliases} <= rows]
        assert sorted(args[0] for args in Task.objects.values_list("args", flat=True)) == expected


@contextmanager
def several_databases():
    """Make each alias a session of its own, in the order of ``ALIASES``."""
    default, settings = connections["default"], connections.settings
    with ExitStack() as undo:
        undo.callback(setattr, connections, "settings", settings)
        connections.settings = dict.fromkeys(ALIASES, default.settings_dict)
        for alias in (ALIASES[0], ALIASES[-1]):
            other = dedicated_connection("default")
            # Django's test case lets no alias connect that it does not know.
            other.ensure_connection()
            other.alias = alias
            connections[alias] = other
            undo.callback(connections.__delitem__, alias)
            undo.callback(other.close)
        yield


@pytest.fixture
def written():
    """Make the table of the rows that the calls write, and the databases."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE written (number int, alias text)")
    with several_databases():
        assert [each.alias for each in connections.all(initialized_only=True)] == list(ALIASES)
        yield
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE written")


@given(program=PROGRAMS)
@example(program=[block("before", block("default", block("before", CALL, end="raise")))])
@example(program=[block("before", block("default", block("before", CALL), end="raise"))])
@example(program=[block("default", block("before", block("default", CALL, end="raise")))])
@example(program=[block("before", block("behind", block("before", CALL, end="set_rollback"), end="raise"))])
@example(program=[block("default", block("before", block("before", CALL, kind="on_commit")), end="raise")])
def check(program):
    Task.objects.all().delete()
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM written")
    run = Run()
    run.steps(program)
    run.judge()


@pytest.mark.usefixtures("written")
def test_a_task_exists_if_and_only_if_all_transactions_of_its_call_are_committed():
    check()
