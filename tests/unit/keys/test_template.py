"""Templates of keys."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from django_pglock.errors import LockKeyError
from django_pglock.keys.template import KeyTemplate


def template(text, known=("order_id", "request")):
    return KeyTemplate(text, known=known, where="here")


def test_templates_escape_what_they_are_given():
    request = SimpleNamespace(user=SimpleNamespace(pk="1:2"))
    assert template("a:{request.user.pk}:{order_id}").render({"request": request, "order_id": 5}) == "a:1%3A2:5"


def test_the_names_are_those_of_parameters_and_of_their_attributes():
    assert template("a:{request.user.pk}:b:{order_id}").names == {"request", "user", "pk", "order_id"}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{order_id}", "{order_id}"),
        ("a{request.user}", "{request.user}"),
        ("a:{order_id}{request.user}", "{request.user}"),
    ],
)
def test_a_field_without_a_colon_before_it_is_refused(text, field):
    with pytest.raises(LockKeyError) as error:
        template(text)
    assert str(error.value) == (
        f"here: the key {text!r} has no colon before {field}, so two different keys could become the same name. "
        f"Write it like 'order:{field}'."
    )


def test_only_the_first_field_of_an_own_name_needs_no_colon():
    own = KeyTemplate("a{order_id}:{request}", known=None, where="here", is_own=True)
    assert own.render({"order_id": 1, "request": 2}) == "a1:2"
    with pytest.raises(LockKeyError, match=r"no colon before \{request}"):
        KeyTemplate("{order_id}{request}", known=None, where="here", is_own=True)


def test_braces_that_are_doubled_stand_for_themselves():
    assert template("a{{b}}:{order_id}").render({"order_id": 5}) == "a{b}:5"


@pytest.mark.parametrize("known", [("order_id", "request"), None], ids=["known", "unknown"])
@pytest.mark.parametrize(
    "field",
    [
        "{request.__class__}",
        "{request._x}",
        "{order_id[0]}",
        "{}",
        "{0}",
        "{request.}",
        "{order_id!r}",
        "{order_id:>5}",
    ],
)
def test_a_field_is_a_parameter_with_public_attributes(field, known):
    with pytest.raises(LockKeyError, match=r"here: .* must be a parameter, or attributes of one"):
        template(f"a:{field}", known)


@pytest.mark.parametrize("text", ["{", "a:{order_id", "a}"])
def test_a_text_that_is_no_template_is_refused(text):
    with pytest.raises(LockKeyError, match=r"here: .* is not a valid template"):
        template(text)


def test_a_parameter_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(
        LockKeyError, match=r"names 'nobody', which is not a parameter\. The parameters: order_id, request"
    ):
        template("a:{nobody.pk}")
    with pytest.raises(LockKeyError, match="The parameters: none"):
        template("a:{nobody}", known=())


@pytest.mark.parametrize("value", [None, True, ""])
def test_a_value_that_would_make_strangers_share_a_lock_is_refused(value):
    with pytest.raises(LockKeyError, match="order_id"):
        template("a:{order_id}").render({"order_id": value})


def test_a_field_without_a_value_is_named():
    path = template("a:{request.user.pk}")
    for values, name in (({}, "request"), ({"request": SimpleNamespace(user=SimpleNamespace())}, "pk")):
        with pytest.raises(LockKeyError, match=rf"^here: \{{request\.user\.pk}} has no value for a key .*'{name}'"):
            path.render(values)
