"""Options and methods of other task queues are answered with those of this package."""

from __future__ import annotations

import pytest

from django_pglock.errors import TaskOptionError
from django_pglock.tasks import fields, option_hints


def test_option_hints_map_foreign_options_to_existing_options():
    ours = {*fields.OPTIONS, *fields.CALL_ONLY}
    assert {*option_hints.OPTIONS.values(), *option_hints.NOTES} <= ours
    assert not ours & {*option_hints.OPTIONS, *option_hints.INSTEAD}
    assert not {*option_hints.OPTIONS} & {*option_hints.INSTEAD}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        # keep_result would keep a task that nobody wants any more, and delete one that has run.
        ("expires", "a waiting task does not expire. Pass the date"),
        ("ttl", "a waiting task does not expire. Pass the date"),
        ("result_ttl", "write keep_result, the seconds after its end"),
        # after= of this task would make it wait for the other one.
        ("link", r"enqueue the other task with using\(after=result\)"),
        ("depends_on", r"Write task.using\(after=...\)"),
        ("acks_late", "always runs again, so leave it out"),
    ],
)
def test_a_hint_never_sends_people_to_the_opposite(name, said):
    with pytest.raises(TaskOptionError, match=said):
        fields.check_names(None, [name], fields.OPTIONS)


def test_method_hints_map_foreign_methods_to_existing_methods():
    names = {text.partition("(")[0] for text in option_hints.METHODS.values() if not text.startswith("raise ")}
    assert all(hasattr(fields.TaskFields, name) for name in names - {"enqueue_on_commit"})
    assert not [name for name in option_hints.METHODS if name in dir(fields.TaskFields)]


def test_an_option_that_is_only_misspelt_is_found_too():
    assert option_hints.about_option("max_attempt", fields.OPTIONS).startswith("write max_attempts")
    assert option_hints.about_option("colour", fields.OPTIONS).startswith("its options are advisory, atomic, backend")


def test_option_hints_name_only_options_that_can_be_used():
    assert option_hints.about_option("queue", ["queue_name", "priority"]) == "write queue_name."
    assert option_hints.about_option("queue", ["priority", "after"]) == "its options are after, priority."
    assert option_hints.about_option("prior", ["priority"]) == "write priority."
    # Two thirds of the letters are the same.
    assert option_hints.about_option("fun", ["fan"]) == "its options are fan."
