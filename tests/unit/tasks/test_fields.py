"""Functions that read the options of a task."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from django_pglock import task
from django_pglock.errors import TaskOptionError
from django_pglock.tasks import definition, fields
from django_pglock.tasks.fields import By
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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("delay", "tests.sample.tasks.echo has no delay(); write enqueue(…)."),
        ("apply_async", "tests.sample.tasks.echo has no apply_async(); write using(…).enqueue(…)."),
        ("retry", "tests.sample.tasks.echo has no retry(); write raise Retry(…)."),
        ("nonsense", "'PostgresTask' object has no attribute 'nonsense'"),
    ],
)
def test_a_method_of_another_task_queue_is_answered_with_ours(name, said):
    assert not hasattr(tasks.echo, name)
    with pytest.raises(AttributeError) as refused:
        getattr(tasks.echo, name)
    assert str(refused.value) == said
    # From these, Python suggests the nearest attribute.
    assert (refused.value.name, refused.value.obj) == (name, tasks.echo)


def test_each_foreign_method_is_answered_with_a_method_that_a_task_has():
    ours = {text.partition("(")[0] for text in fields.FOREIGN_METHODS.values()} - {"raise Retry"}
    assert all(hasattr(tasks.echo, name) for name in ours)
    assert not {*fields.FOREIGN_METHODS} & {*dir(tasks.echo)}


def test_a_task_is_compared_by_its_options_and_can_be_a_key():
    call = tasks.echo.using(meta={"trace": "abc"}, timeout=5)
    assert call == tasks.echo.using(meta={"trace": "abc"}, timeout=5)
    assert hash(call) == hash(tasks.echo.using(meta={"trace": "other"}, timeout=5))
    definition = task(send)
    assert definition.carried == {}
    for name in ("carried", "kept"):
        assert name not in repr(call)
        object.__setattr__(call, name, {"timeout": 3})
        assert call == tasks.echo.using(meta={"trace": "abc"}, timeout=5), "only options are compared"


@pytest.mark.parametrize("name", ["carried", "kept"])
def test_internal_attributes_of_a_task_are_no_options(name):
    with pytest.raises(TaskOptionError, match=f"has no option '{name}'"):
        task(**{name: 1})(send)


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
    ("by", "name", "said"),
    [
        (By.FUNCTION, "max_attempt", "send has no option 'max_attempt'; write max_attempts."),
        (By.FUNCTION, "colour", "send has no option 'colour'; its options are advisory, atomic, backend, backoff, "),
        (By.FUNCTION, "after", "after is an option of a single call. Write task.using(after=...)."),
        (By.CALL, "backoff", "backoff is an option of @task; a single call cannot change it."),
        (By.CALL, "backof", "send has no option 'backof'; its options are after, atomic, backend, concurrency, "),
        (By.CALL, "carried", "send has no option 'carried'; "),
        (By.BOTH, "max_retries", "no option 'max_retries'; write max_attempts, which counts the first attempt."),
        (By.FUNCTION, "eta", "send has no option 'eta'; write using(run_after=…)."),
        (By.CALL, "retry_delay", "send has no option 'retry_delay'; write @task(backoff=…)."),
        # keep_result would keep a task that nobody wants any more, and delete one that has run.
        (By.CALL, "expires", "because a waiting task does not expire."),
        # after= of this task would make it wait for the other one.
        (By.FUNCTION, "link", "write using(after=result) for the other task, with the result of this one."),
    ],
)
def test_an_unknown_option_is_refused_with_one_that_can_be_used(by, name, said):
    with pytest.raises(TaskOptionError, match=re.escape(said)):
        fields.check_names("send", [name], by)


def test_decorator_and_using_answer_options_of_another_task_queue_with_ours():
    with pytest.raises(TaskOptionError, match=r"'queue'; write queue_name\. .*'retries'; write max_attempts, which"):
        task(retries=3, queue="mail")(tasks.echo.func)
    with pytest.raises(TaskOptionError, match=r"echo\.using\(\) has no option 'countdown'; write using\(run_after=…\)"):
        tasks.echo.using(countdown=5)


def test_each_foreign_option_is_answered_with_an_option_where_it_can_be_given():
    assert not {*fields.OPTIONS} & {*fields.FOREIGN_OPTIONS}
    for text in fields.FOREIGN_OPTIONS.values():
        for place, name in re.findall(r"(@task|using)\((\w+)=", text):
            assert name in {"@task": fields.OF_FUNCTION, "using": fields.OF_CALL}[place]
    names = {text.partition(",")[0] for text in fields.FOREIGN_OPTIONS.values()} - {"nothing"}
    assert {name for name in names if name.isidentifier()} <= {*fields.OF_FUNCTION} & {*fields.OF_CALL}
