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


@pytest.mark.parametrize(
    "text",
    [
        "{nobody}",
        "{request.__class__}",
        "{request._x}",
        "{order_id[0]}",
        "{order_id!r}",
        "{order_id:>5}",
        "{",
        "{}",
        "{0}",
    ],
)
def test_a_template_that_cannot_work_is_refused_when_it_is_written(text):
    with pytest.raises(LockKeyError, match="here"):
        template(text)


@pytest.mark.parametrize("value", [None, True, ""])
def test_a_value_that_would_make_strangers_share_a_lock_is_refused(value):
    with pytest.raises(LockKeyError, match="order_id"):
        template("a:{order_id}").render({"order_id": value})
    with pytest.raises(LockKeyError, match="no value"):
        template("a:{order_id}").render({})
