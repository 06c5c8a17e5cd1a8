"""The unique key of a call: the same for each way to give the same arguments, and another for other arguments."""

from __future__ import annotations

import functools
import hashlib
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_pglock import Rate, task
from django_pglock.errors import LockKeyError, TaskArgumentsError
from django_pglock.tasks.arguments import to_json
from django_pglock.tasks.call_keys import (
    LONGEST_ARGUMENTS,
    LONGEST_KEY,
    check_call,
    key_maker,
    keys_of,
)


@task(unique=True)
def ship(order_id, options=None, /, note="", places=()):
    """Takes some arguments by position."""


@task(unique=True)
def bill(order_id, options=None, note="", places=()):
    """Takes each argument in both ways."""


@task(unique=True)
def gather(first, *rest, note="", **more):
    """Takes any number of arguments."""


@task(unique=True, lock="sort:{first}")
def sort(first, /, **more):
    """Takes an argument by position, and another one of the same name."""


@task(unique=True, fair="{shop}")
def pack(shop, number):
    """Has ``fair`` and ``unique``."""


@task(unique=True, takes_context=True)
def report(context, order_id):
    """Takes a context, which is no argument of a call."""


@task(unique=True)
def sweep(*places, **more):
    """Has only optional parameters."""


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab{}[]",:\\é', max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet="ab", max_size=2), inner, max_size=3),
    max_leaves=5,
)


def key(function, *args, **kwargs):
    """Return the key as it is made at enqueue."""
    text = to_json(list(args), what="It")
    return key_maker(function)(args, kwargs, text).unique


@given(VALUES, VALUES, VALUES)
def test_arguments_by_position_and_by_name_make_the_same_key(order, options, note):
    keys = {
        key(bill, order, options, note, ()),
        key(bill, order, options, note),
        key(bill, order, options, note=note, places=[]),
        key(bill, note=note, options=options, order_id=order),
        keys_of(bill, (order, options, note, ()), {}).unique,
    }
    assert len(keys) == 1


def test_arguments_by_position_and_by_name_make_the_same_key_without_optional_arguments():
    """The text of the positional arguments alone would be another key."""
    assert key(report, 1) == key(report, order_id=1)
    assert key(gather, 1) == key(gather, first=1)
    assert key(sweep) == keys_of(sweep, (), {}).unique
    with pytest.raises(TaskArgumentsError, match="report cannot be called like this"):
        key(report, 1, 2)
    with pytest.raises(TaskArgumentsError, match="bill cannot be called like this"):
        key(bill, 1, 2, "", (), other=3)


@given(VALUES, VALUES)
def test_different_arguments_make_different_keys(one, other):
    is_same = to_json(one, what="It", sort_keys=True) == to_json(other, what="It", sort_keys=True)
    for function in (ship, bill, gather):
        assert (key(function, one, 5) == key(function, other, 5)) is is_same
        assert (key(function, 5, one) == key(function, 5, other)) is is_same


def test_a_call_that_is_unique_by_all_its_arguments_has_its_other_keys():
    keys = key_maker(pack)((1, 2), {}, to_json([1, 2], what="It"))
    assert (keys.fair, keys.unique) == ("1", f"{pack.module_path} [1,2]")


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    "options", [{"lock": "bill:{order_id}"}, {"fair": "{note}"}, {"rate": "5/m"}, {"redact": ("note",)}], ids=str
)
def test_the_text_of_the_arguments_changes_no_key(options):
    """With ``unique=True`` as the only key the text alone is enough. Other keys, and ``redact``, need more."""
    decorated = task(unique=True, **options)(bill.func)
    keys = key_maker(decorated)((1, None, "a", []), {}, '[1,null,"a",[]]')
    assert keys == keys_of(decorated, (1, None, "a", []), {})
    assert (keys.lock is None, keys.fair is None) == ("fair" in options or "redact" in options, "fair" not in options)
    assert ('"a"' in keys.unique) is ("redact" not in options)


def test_an_argument_that_is_no_part_of_a_key_is_refused_by_the_name_of_the_function():
    with pytest.raises(TaskArgumentsError, match=r"^The arguments of tests\.unit\.tasks\.test_call_keys\.bill .*a set"):
        keys_of(bill, ({1},), {})


def test_the_order_of_the_keys_of_a_dict_does_not_matter():
    assert key(bill, 1, {"a": 1, "b": 2}, "", ()) == key(bill, 1, {"b": 2, "a": 1}, "", ())
    assert key(bill, 1, "{", "", ()) == key(bill, order_id=1, options="{")


@pytest.mark.parametrize(("args", "kwargs"), [((1, 2), {}), ((1,), {"rest": 2}), ((1,), {"note": 2}), ((2, 1), {})])
def test_the_place_of_an_argument_matters(args, kwargs):
    others = [((1, 2), {}), ((1,), {"rest": 2}), ((1,), {"note": 2}), ((2, 1), {})]
    same = [other for other in others if key(gather, *other[0], **other[1]) == key(gather, *args, **kwargs)]
    assert same == [(args, kwargs)]


def test_the_key_of_a_call_stays_what_it_was():
    """Waiting tasks in a database have keys of an earlier version."""
    assert (LONGEST_ARGUMENTS, LONGEST_KEY) == (100, 512)
    path = "tests.unit.tasks.test_call_keys"
    assert key(bill, 1, [2]) == f'{path}.bill [1,[2],"",[]]'
    text = '[{"first":1,"note":"a","other":3,"rest":[2]}]'
    assert key(gather, 1, 2, note="a", other=3) == f"{path}.gather {text}"
    long = "ä" * (LONGEST_ARGUMENTS - len('[1,"","",[]]'))
    assert key(bill, 1, long) == f'{path}.bill [1,"{long}","",[]]'
    digest = hashlib.sha256(f'[1,"{long}.","",[]]'.encode()).hexdigest()
    assert key(bill, 1, f"{long}.") == f"{path}.bill {digest}"


@pytest.mark.usefixtures("own_registry")
def test_a_long_key_is_cut_and_ends_in_its_digest():
    decorated = task(lock="sort:{first}")(sort.func)
    assert keys_of(decorated, ("a" * (LONGEST_KEY - 105),), {}).lock == "sort:" + "a" * (LONGEST_KEY - 105)
    whole = "sort:" + "a" * (LONGEST_KEY - 104)
    assert keys_of(decorated, (whole[5:],), {}).lock == (
        f"{whole[: LONGEST_KEY - 65]}…{hashlib.sha256(whole.encode()).hexdigest()}"
    )
    longest = "a" * 2 * LONGEST_KEY
    assert len(keys_of(decorated, (longest,), {}).lock) == LONGEST_KEY


@pytest.mark.usefixtures("own_registry")
def test_the_name_of_an_advisory_lock_is_not_cut():
    """Other programs use the name, and do not know how this package shortens keys."""
    decorated = task(lock="sort:{first}", advisory=True)(sort.func)
    assert keys_of(decorated, ("a" * (LONGEST_KEY - 105),), {}).lock == "sort:" + "a" * (LONGEST_KEY - 105)
    with pytest.raises(TaskArgumentsError, match=f"has {LONGEST_KEY - 99} characters.* {LONGEST_KEY - 100} at most"):
        keys_of(decorated, ("a" * (LONGEST_KEY - 104),), {})


@pytest.mark.usefixtures("own_registry")
def test_a_group_without_a_lock_is_also_the_lock_of_its_calls():
    decorated = task(group="{first}")(sort.func)
    with pytest.raises(TaskArgumentsError, match=r"sort has a group, so its calls take only keyword arguments\."):
        keys_of(decorated, (1,), {})
    keys = keys_of(decorated, (), {"first": 1})
    assert (keys.lock, keys.group) == (f"%group {sort.module_path} 1", "1")


@pytest.mark.usefixtures("own_registry")
def test_a_template_names_parameters_and_the_lock_begins_with_a_text():
    def send(order_id, customer):
        """Has two parameters."""

    def collect(order_id, **more):
        """May have any parameter."""

    send.__qualname__, collect.__qualname__ = "sort", "gather"
    for option in ("lock", "fair", "unique", "rate"):
        value = Rate(1, key="a:{nothing}") if option == "rate" else "a:{nothing}"
        with pytest.raises(
            LockKeyError, match=r"'nothing', which is not a parameter\. The parameters: customer, order_id"
        ):
            task(**{option: value})(send)
        assert task(**{option: value})(collect)
    assert task(group="{nothing}")(send)
    assert task(fair="{order_id}", unique="{customer}")(send)
    with pytest.raises(LockKeyError, match=r"no colon before \{order_id}"):
        task(lock="{order_id}")(send)


def send(order_id: int, copy: bool = False, *, urgent: bool = False) -> None: ...
def keyword_only(*, order_id): ...
def positional_only(order_id, /): ...
def anything(*args, **kwargs): ...
def with_context(context, order_id): ...


@functools.wraps(with_context)
def injecting(*args, **kwargs):
    return with_context("a context of its own", *args, **kwargs)


def refusal(function, args, kwargs, *, takes_context=False, group=None):
    task = SimpleNamespace(func=function, takes_context=takes_context, group=group, module_path="shop.tasks.send")
    try:
        check_call(task, args, kwargs)
    except TaskArgumentsError as error:
        return str(error)
    return None


CALLS = [((), {}), ((1,), {}), ((1, 2), {}), ((1, 2, 3), {}), ((), {"order_id": 1}), ((1,), {"order_id": 1})]
CALLS += [((1,), {"urgent": 2}), ((1,), {"copy": 2}), ((1,), {"orderid": 2}), ((), {"copy": 1})]


@pytest.mark.parametrize("takes_context", [False, True])
@pytest.mark.parametrize("function", [send, keyword_only, positional_only, anything, with_context, injecting])
def test_the_call_check_refuses_exactly_the_calls_that_python_refuses(function, takes_context):
    for args, kwargs in CALLS:
        try:
            function(*[None] * takes_context, *args, **kwargs)
        except TypeError:
            is_wrong = function is not injecting  # the function takes all arguments, and fails inside
        else:
            is_wrong = False
        assert bool(refusal(function, args, kwargs, takes_context=takes_context)) is is_wrong, (args, kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "missing a required argument: 'order_id'"),
        ((1,), {"orderid": 1}, "got an unexpected keyword argument 'orderid'"),
        ((1, 2, 3), {}, "got too many positional arguments"),
        ((1,), {"order_id": 1}, "got multiple values for argument 'order_id'"),
    ],
)
def test_the_call_check_gives_the_message_of_python_and_the_signature(args, kwargs, said):
    expected = f"shop.tasks.send() {said}. It takes (order_id, copy=False, *, urgent=False)."
    assert refusal(send, args, kwargs) == expected


def test_the_context_is_not_shown_because_the_worker_adds_it():
    assert refusal(with_context, (), {}, takes_context=True).endswith("It takes (order_id).")


def test_calls_of_a_group_are_not_calls_of_the_function():
    assert refusal(send, (), {"orderid": 1}, group="shop") is None


def test_a_function_without_a_signature_is_not_checked():
    assert refusal(getattr, (), {"nothing": 1}) is None
