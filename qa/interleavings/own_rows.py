"""Rows of a table of the user's own, which move from status to status, each by one caller."""

from __future__ import annotations

from collections import defaultdict
from itertools import permutations

from django.db.models import F

from qa.interleavings.judge import Judge, law
from qa.interleavings.verbs import Results, in_a_transaction, verb
from qa.interleavings.worlds import World
from tests.sample.models import Letter


def own_rows(world: World) -> None:
    Letter.objects.bulk_create(Letter(text=status, status=status) for status in ("new", "new", "new", "back", "taken"))
    world.keeps(Letter)
    world.facts = {"letters": {row.pk: row for row in Letter.objects.all()}}


def moves(name: str, *sources: str, to: str, limit: int | None = None) -> None:
    """Add a verb that moves letters."""

    def call(world: World, results: Results) -> None:
        rows = Letter.objects.filter(status__in=sources).order_by("pk")
        moved = rows.claim_update(limit, status=to, attempts=F("attempts") + 1)
        assert all(row.status == to for row in moved)
        results.moves += [(row.pk, sources, to) for row in moved]

    call.__name__ = name
    verb("own_rows")(call)
    in_a_transaction(name)


moves("take_two", "new", to="taken", limit=2)
moves("take_all", "new", "back", to="taken")
moves("bring_back", "taken", to="back")
moves("lose", "back", "new", to="lost")


@verb("own_rows")
def hold_letters(world: World, results: Results) -> None:
    """Lock letters for the length of a transaction, and save one of them."""
    with Letter.objects.filter(status="new").order_by("pk").claim(2) as rows:
        for row in rows:
            row.status, row.attempts = "held", row.attempts + 1
            row.save()
    results.moves += [(row.pk, ("new",), "held") for row in rows]


@verb("own_rows")
def write_off(world: World, results: Results) -> None:
    """Change a row as any program does that knows nothing of claims."""
    pk = min(world.facts["letters"])
    if Letter.objects.filter(pk=pk, status="new").update(status="lost", attempts=F("attempts") + 1):
        results.moves.append((pk, ("new",), "lost"))


in_a_transaction("write_off")


@law("own_rows")
def each_row_moves_by_one_caller(judge: Judge) -> None:
    """The moves in the results of the callers are possible in some order, and no other move has happened."""
    before, by_row = judge.world.facts["letters"], defaultdict(list)
    for pk, sources, to in judge.results.moves:
        by_row[pk].append((sources, to))
    for row in Letter.objects.all():
        moves = by_row[row.pk]
        # A verb that has died has no result.
        assert judge.has_died or row.attempts == len(moves), (
            f"{row!r} has moved {row.attempts} times, and was told {moves}"
        )
        is_possible = any(_end(before[row.pk].status, order) == row.status for order in permutations(moves))
        assert judge.has_died or is_possible, f"{row!r} was moved by two: {moves}"


def _end(status: str, moves: tuple[tuple[tuple[str, ...], str], ...]) -> str | None:
    for sources, to in moves:
        if status not in sources:
            return None
        status = to
    return status
