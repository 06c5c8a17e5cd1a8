"""The queues that a worker serves, and the order of its polls."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from django_pglock.errors import ConfigurationError
from django_pglock.tasks.queues import OWN_QUEUE
from django_pglock.worker.queues import Queues


def firsts(queues, ready, looks):
    return [queues.poll_order(ready)[0] for _ in range(looks)]


@pytest.mark.parametrize(
    ("queues", "served", "left"),
    [
        (Queues(), ["default", "mail"], []),
        (Queues(["mail"]), ["mail"], ["default", "mail-bulk"]),
        (Queues(["mail*", "low=2"]), ["mail", "mail-bulk", "low"], ["default", "mai", "lower"]),
        (Queues(["mail*"], exclude=["mail-bulk"]), ["mail", "mail-bulk2"], ["mail-bulk", "default"]),
        (Queues(exclude=["mail*", "low"]), ["default", "lower"], ["mail", "mail-bulk", "low"]),
        (Queues(["*"]), ["default"], []),
        (Queues(["a=b=3"]), ["a=b"], ["a", "a=b=3"]),
    ],
)
def test_names_prefixes_and_exclusions_define_the_served_queues(queues, served, left):
    assert [name for name in served + left if queues.serves(name)] == served
    assert sorted(queues.poll_order(sorted(served + left))) == sorted(served)


def test_weighted_turns_are_interleaved_as_in_nginx():
    queues = Queues(["a=5", "b", "c"])
    assert firsts(queues, ["a", "b", "c"], 7) == ["a", "a", "b", "a", "c", "a", "a"]
    assert queues.poll_order(["c", "b"]) == ["b", "c"], "who did not come first is next"


@pytest.mark.parametrize("seed", range(0, 20, 3))
def test_in_a_cycle_each_queue_comes_first_as_often_as_its_weight(seed):
    weights = {f"q{n}": random.Random(seed * 99 + n).randint(1, 60) for n in range(2 + seed)}
    queues = Queues([f"{name}={weight}" for name, weight in weights.items()])
    total = sum(weights.values())
    for _ in range(3):
        assert Counter(firsts(queues, list(weights), total)) == weights


def test_each_queue_has_the_weight_of_the_longest_matching_pattern():
    queues = Queues(["m*=2", "mail*=3", "mail-urgent=10", "*"])
    ready = ["default", "mail-a", "mail-b", "mail-urgent", "misc"]
    expected = {"default": 1, "mail-a": 3, "mail-b": 3, "mail-urgent": 10, "misc": 2}
    assert Counter(firsts(queues, ready, 19)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_a_light_queue_does_not_starve_beside_changing_heavy_queues(seed):
    """The heavy queues are ready at random. The light one is always ready, and waits for two rounds at most."""
    queues = Queues(["light", "heavy*=7", "*=20"])
    rng = random.Random(seed)
    others = ["heavy-1", "heavy-2", "x", "y", "z"]
    waited, longest = 0, 0
    for _ in range(2000):
        ready = ["light", *rng.sample(others, rng.randint(0, 5))]
        waited = 0 if queues.poll_order(ready)[0] == "light" else waited + 1
        longest = max(longest, waited)
    assert longest <= 2 * (1 + 7 + 7 + 20 + 20 + 20)


def test_names_without_weights_are_searched_in_their_order_and_the_queues_of_a_prefix_take_turns():
    queues = Queues(["high", "mail*", "low", "mail-last"])
    ready = ["low", "mail-last", "mail-b", "other", "mail-a", "high"]
    polls = [queues.poll_order(ready) for _ in range(4)]
    assert [(each[0], each[3:]) for each in polls] == [("high", ["low", "mail-last"])] * 4
    assert [each[1:3] for each in polls] == [["mail-a", "mail-b"], ["mail-b", "mail-a"]] * 2
    assert firsts(Queues(), ["b", "c", "a"], 6) == ["a", "b", "c"] * 2, "no queue of a worker of all starves"
    assert firsts(Queues(["b", "a=1"]), ["b", "a"], 4) == ["b", "a"] * 2, "one weight is enough"


@pytest.mark.parametrize("queues", [Queues(["mail"]), Queues(["mail"], exclude=["d*"]), Queues(["mail=9", "low"])])
def test_the_own_tasks_of_the_package_are_always_served_and_first(queues):
    assert queues.serves(OWN_QUEUE)
    assert queues.poll_order(["mail", OWN_QUEUE]) == [OWN_QUEUE, "mail"]
    assert OWN_QUEUE not in queues.given


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"names": [""]}, "name of a queue is empty: ''"),
        ({"names": [" =2"]}, "name of a queue is empty: ' =2'"),
        ({"names": ["a"], "exclude": [""]}, "name of a queue is empty"),
        ({"names": ["ma*il"]}, "is allowed only at the end of a queue's name: 'ma[*]il'"),
        *[
            ({"names": [f"mail={weight}"]}, f"weight of queue 'mail' is '{weight}'; use a whole number from 1 to 1000")
            for weight in ("0", "1001", "-1", "1.5", "many", "", "\u0663", "9" * 5000)
        ],
        ({"names": ["a"], "exclude": ["b=2"]}, "'b' is excluded, so it cannot have a weight"),
        ({"names": ["a", "b", "a=2"]}, "'a' is given twice"),
        ({"exclude": ["a", "a"]}, "'a' is given twice"),
        ({"names": ["a", "mail-x", "mail-*"], "exclude": ["mail*", "a"]}, "No queue is left"),
        ({"exclude": ["*"]}, "No queue is left"),
        ({"names": "mail"}, "a list of names; 'mail' is a string"),
    ],
)
def test_invalid_queues_are_refused(arguments, text):
    with pytest.raises(ConfigurationError, match=text):
        Queues(**arguments)


def test_the_largest_weight_is_a_weight_and_others_may_be_excluded():
    assert Queues(["a=1000", "b=1"], exclude=["b"]).poll_order(["a", "b"]) == ["a"]
    assert Queues(["a", "a*"]).serves("ab"), "a name and a prefix are two things"
