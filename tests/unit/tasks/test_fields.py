"""Functions that read the options of a task."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from django.template import Context, Template

from django_pglock import task
from django_pglock.errors import TaskOptionError
from django_pglock.tasks import definition, fields
from tests.sample import tasks

pytestmark = pytest.mark.usefixtures("own_registry")


def send(order=None): ...


@pytest.mark.parametrize(
    ("options", "has_keys"),
    [
        ({}, False),
        ({"timeout": 5}, False),
        ({"keep_result": 5}, False),
        ({"lock": "order:{order}"}, True),
        ({"unique": True}, True),
        ({"group": "{order}"}, True),
        ({"fair": "{order}"}, True),
        ({"rate": "1/s"}, True),
    ],
)
def test_a_call_has_keys_if_one_of_five_options_makes_some(options, has_keys):
    assert task(**options)(send).has_keys is has_keys


def test_an_exception_is_retried_if_it_is_of_the_one_and_not_of_the_other_types():
    definition = task(retry_on=(OSError, KeyError), no_retry_on=ConnectionError)(send)
    retried = [
        error for error in (OSError(), KeyError(), ConnectionError(), ValueError()) if definition.can_retry(error)
    ]
    assert [type(each) for each in retried] == [OSError, KeyError]
    assert task(send).can_retry(ValueError())
    assert not task(send).can_retry(SystemExit())


def test_none_does_not_change_an_option():
    call = tasks.echo.using(priority=5, timeout=3)
    assert call.using(priority=None, queue_name=None, timeout=None) == call


@pytest.mark.parametrize("name", ["delay", "nonsense"])
def test_an_attribute_that_is_not_there_is_named_so_that_python_can_suggest_another(name):
    with pytest.raises(AttributeError) as refused:
        getattr(tasks.echo, name)
    assert (refused.value.name, refused.value.obj) == (name, tasks.echo)


def test_a_task_is_compared_by_its_options_and_can_be_a_key():
    call = tasks.echo.using(meta={"trace": "abc"}, timeout=5)
    assert call == tasks.echo.using(meta={"trace": "abc"}, timeout=5)
    assert hash(call) == hash(tasks.echo.using(meta={"trace": "other"}, timeout=5))
    definition = task(send)
    assert (definition.carried, definition.kept) == ({}, {})
    for name in ("carried", "kept"):
        assert name not in repr(call)
        object.__setattr__(call, name, {"timeout": 3})
        assert call == tasks.echo.using(meta={"trace": "abc"}, timeout=5), "only options are compared"


@pytest.mark.parametrize("name", ["carried", "kept"])
def test_internal_attributes_of_a_task_are_no_options(name):
    with pytest.raises(TaskOptionError, match=f"has no option '{name}'"):
        task(**{name: 1})(send)


def test_without_options_a_task_has_one_attempt_and_a_template_does_not_call_it():
    definition = task(send)
    assert definition.max_attempts == 1
    assert Template("{{ task.module_path }}").render(Context({"task": definition})).endswith(".send")


def test_each_foreign_word_means_one_option_and_is_no_option_of_ours():
    assert not {*fields.OPTIONS} & {*fields.WORDS, *fields.INSTEAD}
    assert not {*fields.WORDS} & {*fields.INSTEAD}
    assert len(fields.WORDS) == sum(len(each.foreign) for each in fields.OPTIONS.values()), "a word has two meanings"


def test_type_checkers_know_the_options_of_the_table():
    source = ast.parse(Path(definition.__file__).read_text())
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
    names = {text.partition("(")[0] for text in fields.METHODS.values() if not text.startswith("raise ")}
    assert all(hasattr(fields.TaskFields, name) for name in names - {"enqueue_on_commit"})
    assert not [name for name in fields.METHODS if name in dir(fields.TaskFields)]


def test_an_option_that_is_only_misspelt_is_found_too():
    assert fields.about_option("max_attempt", fields.OF_FUNCTION).startswith("write max_attempts")
    assert fields.about_option("colour", fields.OF_FUNCTION).startswith("its options are advisory, atomic, backend")


def test_option_hints_name_only_options_that_can_be_used():
    assert fields.about_option("queue", ["queue_name", "priority"]) == "write queue_name."
    assert fields.about_option("queue", ["priority", "after"]) == "its options are after, priority."
    assert fields.about_option("prior", ["priority"]) == "write priority."
    # Two thirds of the letters are the same.
    assert fields.about_option("fun", ["fan"]) == "its options are fan."
