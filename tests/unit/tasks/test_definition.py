"""The options of a task are checked when it is decorated."""

from __future__ import annotations

import ast
import re
from copy import copy
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.utils import timezone

from django_pglock import Linear, Rate, task
from django_pglock.errors import ConfigurationError, LockKeyError, TaskOptionError
from django_pglock.tasks import definition, fields, registry
from django_pglock.tasks.compat import BaseTaskBackend, InvalidTask, task_backends
from django_pglock.tasks.definition import PostgresTask
from django_pglock.tasks.fields import By
from tests.sample import portable_tasks, tasks

pytestmark = pytest.mark.usefixtures("own_registry")


DUMMY = f"{BaseTaskBackend.__module__.removesuffix('base')}dummy.DummyBackend"


def test_an_option_without_its_name_is_refused():
    with pytest.raises(TaskOptionError, match=r"@task is given .mail., which is no function"):
        task("mail")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lock": "order:{nobody}"}, "nobody"),
        *(({"max_attempts": bad}, "never: max_attempts is .*; give a number from 1 to 32,767") for bad in (0, 32_768)),
        *(({"max_attempts": bad}, f"never: max_attempts is {bad!r}") for bad in (True, 1.5, None)),
        *(({"max_snoozes": bad}, f"never: max_snoozes is {bad!r}; give a number from 0 to") for bad in (-1, True, 1.5)),
        ({"backoff": "soon"}, "backoff is 'soon'"),
        ({"meta": None}, "never: meta is None; give a dict"),
        ({"lock": "a", "rate": Rate(1, key="b")}, "never: with lock, rate cannot have its own key"),
        ({"concurrency": 2}, "needs a key"),
        ({"advisory": True}, "advisory=True needs the name of a lock"),
        ({"wait_for_disk": False}, "never: wait_for_disk=False needs atomic=True"),
        ({"advisory": True, "lock": "a", "concurrency": 2}, "an advisory lock has one holder"),
        ({"advisory": True, "lock": "a", "redact": True}, "users who may view locks see the name"),
        ({"lock": "a", "concurrency": 0}, "concurrency is 0"),
        ({"group": "a", "lock": "b", "concurrency": 2}, "group cannot be combined with"),
        ({"group": "a", "rate": "1/s"}, "group cannot be combined with"),
        ({"lock": "a", "rate": {"key": "b"}}, "rate is"),
        ({"rate": "often"}, "often"),
        ({"rate": "0/s"}, "count is 0"),
        ({"unique": 5}, "unique is 5"),
        ({"lock": 5}, "never: lock is 5; give a template such as 'order:{order_id}'"),
        ({"lock": ""}, "never: lock is ''"),
        ({"fair": ""}, "never: fair is ''"),
        ({"unique": ""}, "Unique: key is ''"),
        ({"group": ""}, "Group: key is ''"),
        ({"retry_on": None}, "never: retry_on is None; give exception types"),
        ({"retry_on": "OSError"}, "never: retry_on is 'OSError'; give exception types and not their names"),
        ({"no_retry_on": ["OSError"]}, "never: no_retry_on is .*; give exception types"),
        ({"rate": 5}, r"never: rate is 5; give a text such as '5/s' or Rate\(…\)"),
        ({"rate": "5 a second"}, "never: rate is '5 a second'; write it as '10/s'"),
        ({"backoff": [1, 2]}, "never: backoff is \\[1, 2\\]"),
        ({"timeout": -1}, "timeout is -1"),
        ({"timeout": 0}, "never: timeout is 0; give more than 0 seconds, or None"),
        ({"timeout": timedelta()}, "never: timeout is 0;"),
        ({"keep_result": "long"}, "keep_result is"),
        ({"keep_result": 1e300}, r"never: keep_result is 1e\+300; the maximum is ten years"),
        ({"timeout": 1e300}, r"never: timeout is 1e\+300; the maximum is ten years"),
        ({"lock": "a\0:{order_id}"}, "never: lock contains a NUL character or a lone surrogate"),
        ({"queue_name": 5}, "never: queue_name is 5; give a text"),
        *(({"priority": bad}, "never: priority is .*; give a whole number from -100 to") for bad in ("hi", 1.5)),
        ({"backend": 5}, "never: backend is 5; give the text of an alias in TASKS"),
        ({"atomic": "yes"}, "never: atomic is 'yes'; give True or False"),
        ({"advisory": 1, "lock": "a"}, "never: advisory is 1; give True or False"),
    ],
)
def test_invalid_options_are_refused_where_they_are_written(options, words):
    with pytest.raises((TaskOptionError, LockKeyError), match=words):

        @task(**options)
        def never(order_id): ...


@pytest.mark.parametrize("value", [True, "x", 1.5, -1])
def test_after_refuses_a_value_that_is_no_id(value):
    with pytest.raises(TaskOptionError, match=r"after is .*; give results or ids of tasks in PostgreSQL"):
        tasks.echo.using(after=[value])


def test_after_says_that_a_result_is_of_another_backend(settings):
    """As in tests with a backend of Django: its ids are texts, and its result is as much a result as ours."""
    settings.TASKS = {"default": {"BACKEND": DUMMY, "QUEUES": []}}
    result = tasks.echo.enqueue(1)
    with pytest.raises(
        TaskOptionError, match=rf"after is \['{result.id}'\]; give results or ids of tasks in PostgreSQL"
    ):
        tasks.echo.using(after=result)


def test_generators_which_could_only_fail_are_no_tasks():
    def generator():
        yield

    async def async_generator():
        yield

    for function in (generator, async_generator):
        with pytest.raises(InvalidTask, match=f"{function.__name__}: a call of a generator function returns before"):
            task(function)


def another():
    """This function is not decorated here: tests decorate it."""


def test_the_limits_of_options_are_taken():
    for options in ({"max_attempts": 1}, {"max_attempts": 32_767}, {"max_snoozes": 0}, {"lock": "a", "rate": "1/s"}):
        assert task(**options)(tasks.echo.func)
    assert task(lock="a", concurrency=1)(tasks.echo.func).concurrency == 1
    assert task(lock="a", advisory=True, redact=())(tasks.echo.func).advisory


def test_a_coroutine_has_no_transaction_of_djangos():
    async def never(): ...

    with pytest.raises(TaskOptionError, match="never: atomic=True needs a sync function"):
        task(atomic=True)(never)


def test_options_become_values_of_one_type():
    """Readers of a definition need not know the short forms."""
    definition = task(
        retry_on=ValueError, no_retry_on=[KeyError], timeout=timedelta(minutes=1), keep_result=5, capture_logs="INFO"
    )(tasks.echo.func)
    assert (definition.retry_on, definition.no_retry_on) == ((ValueError,), (KeyError,))
    assert (definition.timeout, definition.keep_result, definition.capture_logs) == (60.0, 5.0, 20)


@pytest.mark.parametrize(
    ("after", "ids"),
    [
        (7, (7,)),
        ("7", (7,)),
        (SimpleNamespace(id="7"), (7,)),
        ([7, "8", SimpleNamespace(id=9)], (7, 8, 9)),
        ((), ()),
        ([0, 2**63 - 1, "1" * 19], (0, 2**63 - 1, int("1" * 19))),
    ],
)
def test_after_takes_results_and_ids_alone_and_as_a_list(after, ids):
    assert tasks.echo.using(after=after).after == ids


def test_a_call_carries_only_options_that_differ_from_the_definition():
    definition = task(timeout=5, max_snoozes=2)(another)
    assert definition.carried == {}
    assert definition.using(priority=1).carried == {}
    assert definition.using(timeout=5, max_snoozes=3, atomic=True).carried == {"max_snoozes": 3, "atomic": True}


def test_run_after_as_timedelta_becomes_a_date_for_other_backends(settings):
    settings.TASKS = {**settings.TASKS, "dummy": {"BACKEND": DUMMY}}
    before = timezone.now()
    call = tasks.echo.using(backend="dummy", run_after=timedelta(hours=1))
    assert before + timedelta(hours=1) <= call.run_after <= timezone.now() + timedelta(hours=1)
    assert tasks.echo.using(run_after=timedelta(hours=1)).run_after == timedelta(hours=1)
    date = timezone.now()
    assert tasks.echo.using(backend="dummy", run_after=date).run_after == date


def test_run_after_refuses_a_value_that_is_no_date():
    with pytest.raises(TaskOptionError, match=r"echo: run_after is 'x'; give a datetime or a timedelta"):
        tasks.echo.using(run_after="x")


# ``@task``: each way of writing it makes the same object, or says what is wrong with an option.


IMMEDIATE = f"{BaseTaskBackend.__module__.removesuffix('base')}immediate.ImmediateBackend"


def mail(order):
    return order


def test_the_decorator_is_written_with_brackets_or_without():
    plain, called, with_options = task(mail), task()(mail), task(priority=5)(mail)
    assert plain == called
    assert (plain.priority, with_options.priority) == (0, 5)
    assert plain.func is with_options.func is mail


def test_a_function_keeps_our_options_with_another_backend(settings):
    """Tests of projects replace the backend by one of Django's own."""
    settings.TASKS = {"default": {"BACKEND": IMMEDIATE}}
    decorated = task(max_attempts=3, lock="order:{order}")(mail)
    assert isinstance(decorated, PostgresTask)
    assert (decorated.max_attempts, decorated.lock) == (3, "order:{order}")
    assert decorated.enqueue(7).return_value == 7


# Functions that read the options of a task.


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
        (By.FUNCTION, "max_attempt", "send has no option 'max_attempt'. Did you mean 'max_attempts'?"),
        (By.FUNCTION, "colour", "send has no option 'colour'. Its options are advisory, atomic, backend, backoff, "),
        (By.FUNCTION, "after", "after is an option of a single call. Write task.using(after=...)."),
        (By.CALL, "backoff", "backoff is an option of @task; a single call cannot change it."),
        (
            By.CALL,
            "backof",
            "send has no option 'backof'. Its options are after, after_ended, atomic, backend, concurrency, ",
        ),
        (By.CALL, "carried", "send has no option 'carried'. "),
        (By.BOTH, "max_retries", "no option 'max_retries'; write max_attempts, which counts the first attempt."),
        (By.FUNCTION, "eta", "send has no option 'eta'; write using(run_after=…)."),
        (By.CALL, "retry_delay", "send has no option 'retry_delay'; write @task(backoff=…)."),
        # keep_result would keep a task that nobody wants any more, and delete one that has run.
        (By.CALL, "ttl", "write expires."),
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


# Defaults of a backend


def never_again(number): ...


@pytest.fixture
def with_defaults(settings):
    def write(**defaults):
        ours = {"BACKEND": "django_pglock.backend.PostgresBackend", "QUEUES": []}
        settings.TASKS = {"default": {**ours, "OPTIONS": {"defaults": defaults}}, "plain": ours}

    return write


def test_a_function_has_the_defaults_of_its_backend_unless_it_says_otherwise(with_defaults):
    """By our decorator, and by Django's, which gives its own options to each function."""
    with_defaults(timeout=timedelta(minutes=5), max_attempts=3, backoff=Linear(60), retry_on=OSError)
    for decorate in (task, portable_tasks.task):
        made = decorate()(never_again)
        assert (made.timeout, made.max_attempts, made.backoff, made.retry_on) == (300, 3, Linear(60), (OSError,))
    own = task(timeout=None, max_attempts=1)(never_again)
    assert (own.timeout, own.max_attempts, own.backoff) == (None, 1, Linear(60))
    assert own.using(max_attempts=7).max_attempts == 7
    assert own.using(priority=5).timeout is None, "a copy has what the function has"
    assert copy(own).timeout is None
    assert task(backend="plain")(never_again).max_attempts == 1


@pytest.mark.parametrize(
    ("defaults", "text"),
    [
        ({"timeout": 0}, r"TASKS\['default'\]\['OPTIONS'\]\['defaults'\]\['timeout'\] is 0"),
        ({"max_attempts": "3"}, r"\['max_attempts'\] is '3'; give a number from 1"),
        ({"max_attemps": 3}, "has no option 'max_attemps'. Did you mean 'max_attempts'?"),
        ({"lock": "all"}, "has no option 'lock'. Its options are atomic, backoff"),
        ({"on_failure": "shop.tasks.mourn"}, "has no option 'on_failure'"),
    ],
    ids=str,
)
def test_defaults_that_cannot_be_meant_are_refused_when_the_settings_are_read(with_defaults, defaults, text):
    with_defaults(**defaults)
    with pytest.raises(ConfigurationError, match=text):
        task_backends["default"]


def test_the_packages_own_functions_have_no_defaults_of_the_project(with_defaults):
    with_defaults(max_attempts=9)
    own = registry.find("django_pglock.store.bulk.change_tasks")
    assert own.is_own
    assert replace(own).max_attempts == own.max_attempts != 9
