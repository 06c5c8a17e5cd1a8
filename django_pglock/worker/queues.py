"""Which queues a worker serves, and in which order it polls them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from django_pglock.errors import ConfigurationError
from django_pglock.tasks.queues import OWN_QUEUE, covers

#: The size of the cache of queue names and whether they are served. There may be a hundred thousand queues.
MOST_REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class Pattern:
    """The name of a queue or, with ``*`` at its end, a prefix of names; and the weight of each such queue."""

    text: str
    weight: int = 1

    @classmethod
    def parse(cls, asked: str) -> Pattern:
        """Read ``NAME`` or ``NAME=WEIGHT``. Raises ``ConfigurationError``."""
        text, _, weight = asked.rpartition("=") if "=" in asked else (asked, "", "1")
        if not text.strip():
            raise ConfigurationError(f"The name of a queue is empty: {asked!r}.")
        if "*" in text[:-1]:
            raise ConfigurationError(f"A * is allowed only at the end of a queue's name: {text!r}.")
        if not re.fullmatch("[1-9][0-9]{0,2}|1000", weight):
            raise ConfigurationError(f"The weight of queue {text!r} is {weight!r}; use a whole number from 1 to 1000.")
        return cls(text, int(weight))

    @property
    def is_prefix(self) -> bool:
        """Whether it stands for all names with this prefix."""
        return self.text.endswith("*")

    def covers(self, text: str) -> bool:
        """Return whether it covers this name, or all names that another pattern with this text covers."""
        return covers(self.text, text)


#: Few tasks are in it, and people wait for them, perhaps to cancel what the other queues are full of.
OWN = Pattern(OWN_QUEUE, weight=1000)


class Queues:
    """The queues that a worker serves, and always the queue of this package's own tasks.

    ``names`` are names of queues, or prefixes with ``*`` at the end; none: all queues. They are searched in the given
    order. But if one is ``NAME=WEIGHT``, with a weight from 1 to 1000, then over many polls queues are the first in
    proportion to their weights, so no queue starves. The queues of a prefix take turns. If several names match a queue,
    the full name is used, otherwise the longest prefix. ``exclude`` are names or prefixes of queues that are not
    served.

    Raises ``ConfigurationError`` for an invalid name or weight, and if no queue is left.
    """

    def __init__(self, names: Sequence[str] = (), *, exclude: Sequence[str] = ()) -> None:
        self.excluded = _parse_all(exclude, may_have_weights=False)
        wanted = _parse_all(names)
        self.is_weighted = any("=" in each for each in names)
        self.patterns = [each for each in wanted or [Pattern("*")] if not self._is_excluded(each.text)]
        if not self.patterns:
            raise ConfigurationError("No queue is left to serve, because all given queues are also excluded.")
        #: The queues as they are written on the command line.
        self.given = [*names, *(f"--exclude {each}" for each in exclude)]
        self._places = {each: place for place, each in enumerate([OWN, *self.patterns])}
        self._nearest_first = sorted(self.patterns, key=lambda each: (each.is_prefix, -len(each.text)))
        self._credits: dict[tuple[str, int], dict[str, int]] = {}
        # A cache, because this is called twice between a notification and the claim.
        self._pattern_of = lru_cache(maxsize=MOST_REMEMBERED)(self._find_pattern)

    def serves(self, name: str) -> bool:
        """Return whether the worker serves this queue."""
        return self._pattern_of(name) is not None

    def poll_order(self, ready: Sequence[str], *, whose: str = "") -> list[str]:
        """Return the served queues of ``ready``, in the order for this poll.

        ``whose``: the kind of functions that the poll is for. Each kind has its own round-robin state.
        """
        places: dict[int, dict[str, int]] = {}
        found = [(self._places[pattern], name, pattern) for name in ready if (pattern := self._pattern_of(name))]
        for place, name, pattern in sorted(found, key=lambda each: each[:2]):
            places.setdefault(0 if self.is_weighted else place, {})[name] = pattern.weight
        return [name for place, weights in places.items() for name in self._by_weight(weights, (whose, place))]

    def _by_weight(self, weights: dict[str, int], whose: tuple[str, int]) -> list[str]:
        """Order the queues by smooth weighted round-robin, as nginx does.

        In each round every queue gains its weight as credit, and the first queue pays the sum of all weights. Credit
        and debt from rounds with other ready queues are limited to two rounds. With the same queues they stay smaller.
        """
        total = sum(weights.values())
        most, before = 2 * total, self._credits.get(whose, {})
        credit = {name: max(-most, min(most, before.get(name, 0))) + weight for name, weight in weights.items()}
        turn = sorted(credit, key=credit.__getitem__, reverse=True)
        if turn:
            credit[turn[0]] -= total
        self._credits[whose] = credit
        return turn

    def _find_pattern(self, name: str) -> Pattern | None:
        if name == OWN_QUEUE:
            return OWN
        if self._is_excluded(name):
            return None
        return next((each for each in self._nearest_first if each.covers(name)), None)

    def _is_excluded(self, text: str) -> bool:
        return any(each.covers(text) for each in self.excluded)


def _parse_all(names: Sequence[str], *, may_have_weights: bool = True) -> list[Pattern]:
    """Read names, each of which may be given once."""
    if isinstance(names, str):
        raise ConfigurationError(f"Give queues as a list of names; {names!r} is a string.")
    patterns: list[Pattern] = []
    for asked in names:
        pattern = Pattern.parse(asked)
        if "=" in asked and not may_have_weights:
            raise ConfigurationError(f"Queue {pattern.text!r} is excluded, so it cannot have a weight.")
        if pattern.text in [each.text for each in patterns]:
            raise ConfigurationError(f"Queue {pattern.text!r} is given twice.")
        patterns.append(pattern)
    return patterns
