"""Options and methods of other task queues are answered with those of this package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from django_pglock.errors import TaskOptionError
from django_pglock.tasks import decorator, fields, option_hints


def test_each_foreign_word_means_one_option_and_is_no_option_of_ours():
    assert not {*fields.OPTIONS} & {*fields.WORDS, *option_hints.INSTEAD}
    assert not {*fields.WORDS} & {*option_hints.INSTEAD}
    assert len(fields.WORDS) == sum(len(each.foreign) for each in fields.OPTIONS.values()), "a word has two meanings"


def test_type_checkers_know_the_options_of_the_table():
    source = ast.parse(Path(decorator.__file__).read_text())
    typed = {
        each.name: {line.target.id for line in each.body if isinstance(line, ast.AnnAssign)}
        for each in ast.walk(source)
        if isinstance(each, ast.ClassDef)
    }
    assert typed["CallOptions"] | typed["UsingOptions"] == {*fields.OF_CALL}
    # These two change how the function is called: each has an overload of its own.
    assert typed["CallOptions"] | typed["Options"] == {*fields.OF_FUNCTION} - {"takes_context", "group"}


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
        fields.check_names(None, [name], fields.OF_FUNCTION)


def test_method_hints_map_foreign_methods_to_existing_methods():
    names = {text.partition("(")[0] for text in option_hints.METHODS.values() if not text.startswith("raise ")}
    assert all(hasattr(fields.TaskFields, name) for name in names - {"enqueue_on_commit"})
    assert not [name for name in option_hints.METHODS if name in dir(fields.TaskFields)]


def test_an_option_that_is_only_misspelt_is_found_too():
    assert fields.about_option("max_attempt", fields.OF_FUNCTION).startswith("write max_attempts")
    assert fields.about_option("colour", fields.OF_FUNCTION).startswith("its options are advisory, atomic, backend")


def test_option_hints_name_only_options_that_can_be_used():
    assert fields.about_option("queue", ["queue_name", "priority"]) == "write queue_name."
    assert fields.about_option("queue", ["priority", "after"]) == "its options are after, priority."
    assert fields.about_option("prior", ["priority"]) == "write priority."
    # Two thirds of the letters are the same.
    assert fields.about_option("fun", ["fan"]) == "its options are fan."
