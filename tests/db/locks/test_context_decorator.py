"""The decorator: names from arguments, busy calls, and what other packages run, such as Celery's tasks and commands."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from asgiref.sync import async_to_sync
from celery import Celery
from django.core.management.base import BaseCommand

from django_pglock import Lease, LockKeyError, LockNotAvailable, lock
from django_pglock.errors import ConfigurationError
from django_pglock.testing import assert_no_locks, hold
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)
app = Celery("tests", set_as_current=False)


@app.task
@lock("sync:{shop_id}", timeout=0)
def sync(shop_id, full=False):
    return f"{shop_id} {full}"


@app.task(bind=True, name="tests.bound")
@lock("bound:{shop_id}", timeout=0, on_busy=lambda busy, self, shop_id: f"{self.name} skipped {shop_id}")
def bound(self, shop_id):
    return self.request.id


@app.task
@Lease("nightly:{day}", ttl=5, on_busy="skip")
def nightly(day):
    return day


def test_celery_tasks():
    assert sync.apply(args=[5], kwargs={"full": True}).get() == "5 True"
    assert sync(6) == "6 False"
    with hold("sync:5"):
        with pytest.raises(LockNotAvailable):
            sync.apply(args=[5]).get()
        assert sync.apply(args=[6]).successful()
        assert isinstance(sync.apply(args=[5]).result, LockNotAvailable)
    assert bound.apply(args=[7], task_id="one").get() == "one"
    with hold("bound:7"):
        assert bound.apply(args=[7]).get() == "tests.bound skipped 7"
    assert nightly.apply(args=["monday"]).get() == "monday"
    with Lease("nightly:monday"):
        assert nightly.apply(args=["monday"]).get() is None
    assert_no_locks()


def test_django_tasks_in_a_worker(worker, eventually):
    """Two tasks of one key that run at the same time would be counted."""
    for _ in range(6):
        tasks.alone.enqueue("a")
    worker(threads=4)
    eventually(lambda: Effect.objects.filter(name="alone").count() == 6)
    assert set(Effect.objects.filter(name="alone").values_list("number", flat=True)) == {0}


@pytest.mark.parametrize("around", [lock(), lock("a"), Lease("a")])
def test_a_lock_around_a_task_is_refused(around):
    """The decorated function would replace the task, which could then not be enqueued."""
    with pytest.raises(ConfigurationError, match=r"echo.* is a task.*Put @task above"):
        around(tasks.echo)


class Command(BaseCommand):
    @lock("command:{options}", timeout=0)
    def by_options(self, *args, options):
        return "ran"

    @lock("import", timeout=0, on_busy="skip")
    def handle(self, *args, **options):
        return "ran"


def test_management_commands(capsys):
    Command().run_from_argv(["manage.py", "import"])
    with hold("import"):
        Command().run_from_argv(["manage.py", "import"])
    assert capsys.readouterr().out == "ran\n"
    with hold("command:x"), pytest.raises(LockNotAvailable):
        Command().by_options(options="x")


def test_a_template_binds_the_functions_parameters(somebody):
    seen = []

    @lock("sync:{shop_id}:{kind}")
    def sync(shop_id, kind="full"):
        """Its docstring."""
        seen.append(somebody.can_have(f"sync:{shop_id}:{kind}"))
        return shop_id

    assert sync(5) == 5
    assert sync(shop_id="a:b", kind="x") == "a:b"
    assert seen == [False, True], "the colon was escaped, so the plain name stays free"
    assert (sync.__name__, sync.__doc__) == ("sync", "Its docstring.")


def test_without_a_name_the_functions_path_is_the_name(somebody):
    class Shop:
        @lock()
        def close(self):
            return somebody.can_have(f"{__name__}.{Shop.close.__qualname__}")

    assert Shop().close() is False


def test_on_busy_sets_the_answer_of_a_decorated_function_with_a_busy_lock(somebody):
    somebody.holds("a")
    assert lock("a", timeout=0, on_busy="skip")(lambda: "ran")() is None
    assert lock("a", timeout=0, on_busy=lambda busy, value: (busy.name, value))(lambda value: "ran")(7) == ("a", 7)
    with pytest.raises(LockNotAvailable):
        lock("a", timeout=0)(lambda: "ran")()


def test_generator_functions_are_refused_at_decoration():
    async def async_generator():
        yield

    def generator():
        yield

    for function in (async_generator, generator):
        with pytest.raises(ConfigurationError, match="its call returns before its body runs"):
            lock("a")(function)
    with pytest.raises(LockKeyError, match="not a parameter"):
        lock("a:{nobody}")(lambda x: x)


def test_a_function_that_returns_a_coroutine_is_refused_because_it_runs_without_the_lock(somebody):
    """As a decorator does that does not know of coroutines, between the lock and the coroutine function."""

    async def work():
        raise AssertionError("The body ran.")

    with pytest.raises(ConfigurationError, match="returned a coroutine: its call returns before its body runs"):
        lock("a")(lambda: work())()
    assert somebody.can_have("a")


@pytest.mark.parametrize("on_busy", ["skip", lambda busy: None], ids=["skip", "function"])
@pytest.mark.parametrize("make", [partial(lock, timeout=0), Lease], ids=["lock", "Lease"])
def test_on_busy_of_a_block_is_refused_because_the_body_would_run_in_any_case(make, on_busy):
    """A body cannot be skipped, so the option is refused."""
    made = make("a", on_busy=on_busy)
    with pytest.raises(ConfigurationError, match=r"'a': on_busy is for decorated functions.* try_lock"), made:
        raise AssertionError("The body ran.")
    with pytest.raises(ConfigurationError, match="on_busy is for decorated functions"):
        made.acquire()

    async def use():
        async with made:
            raise AssertionError("The body ran.")

    with pytest.raises(ConfigurationError, match="on_busy is for decorated functions"):
        async_to_sync(use)()
    with pytest.raises(ConfigurationError, match="on_busy is for decorated functions"):
        async_to_sync(made.aacquire)()


def test_a_block_without_a_name_and_with_on_busy_is_refused():
    with pytest.raises(ConfigurationError, match=r"^on_busy is for decorated functions"), lock(on_busy="skip"):
        raise AssertionError("The body ran.")


class Callable:
    def __call__(self, number):
        return number


class AsyncCallable:
    async def __call__(self, number):
        with pytest.raises(LockNotAvailable):
            await asyncio.create_task(lock("a", timeout=0).aacquire())
        return number


@pytest.mark.parametrize("function", [Callable(), partial(Callable())], ids=["object", "partial"])
def test_callables_without_a_name_are_decorated_and_need_a_named_lock(function):
    assert lock("a")(function)(5) == 5
    assert lock("a:{number}")(function)(number=5) == 5
    with pytest.raises(LockKeyError, match="has no dotted path that could name the lock"):
        lock()(function)
    with pytest.raises(LockKeyError, match="names 'nobody', which is not a parameter"):
        lock("a:{nobody}")(function)


def test_a_callable_whose_call_is_async_is_decorated_as_a_coroutine_function():
    assert async_to_sync(lock("a")(AsyncCallable()))(5) == 5


@pytest.mark.parametrize("kind", [classmethod, staticmethod, property])
def test_descriptors_are_refused_with_what_to_write(kind):
    with pytest.raises(ConfigurationError, match=f"Put @{kind.__name__} above the lock"):
        lock("a")(kind(print))
