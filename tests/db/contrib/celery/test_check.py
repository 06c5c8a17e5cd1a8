"""What the check finds in the source of a project, and what it rewrites: only what is certain."""

from __future__ import annotations

from textwrap import dedent

import pytest

from django_pglock.contrib.celery import rewrite
from django_pglock.contrib.celery.check import findings, main

FOUND = {
    "from celery.signals import task_failure": "celery.signals: write the signals of django.tasks",
    "import kombu.serialization": "kombu.serialization: write nothing: there is no broker",
    "from celery.events import EventReceiver": "celery.events: write @task",
    "from django_celery_beat.models import PeriodicTask": "rows of Schedule: manage.py celery_schedules",
    "@shared_task(serializer='pickle')\ndef f(): pass": "serializer= of shared_task: write nothing",
    "@app.task(typing=False)\ndef f(): pass": "typing= of task: write nothing: the arguments of each call are checked",
    "@shared_task\nasync def f(): pass": "async def f: write @task of django_pglock",
    "f.apply_async(task_id=x)": "task_id= of apply_async: write nothing: the database gives the ids",
    "async def f():\n    if x:\n        g.delay(1)": "delay() in a coroutine: write await sync_to_async",
    "class A(Model):\n    task_id = models.UUIDField(null=True)": "task_id is a UUIDField: write BigIntegerField",
    "f.chunks(rows, 10)": "chunks(): write group(",
    "app.control.broadcast('x')": "broadcast(): write Task.objects",
    "CELERY_TASK_ROUTES = {'a': 'b'}": "CELERY_TASK_ROUTES: write queue=",
    "app.conf.beat_schedule = {}": "beat_schedule: write @task(cron=…), or rows of Schedule",
    "CELERY_TASK_SERIALIZER = 'yaml'": "CELERY_TASK_SERIALIZER: write nothing: arguments and results are JSON",
    "@app.on_after_configure.connect\ndef f(s): s.add_periodic_task(1)": "add_periodic_task(): write @task(cron=…)",
}
CLEAN = """
    from celery import Celery, chain, shared_task
    from celery.exceptions import Retry
    from celery.utils.log import get_task_logger
    CELERY_TASK_SERIALIZER = "json"
    CELERY_BROKER_URL = "redis://"

    @shared_task(bind=True, acks_late=True, serializer="json", typing=True)
    def f(self):
        self.broadcast("of somebody else")
        pool.map(f, [])

    async def view():
        def in_a_thread():
            f.delay()
        await sync_to_async(in_a_thread)()

    chain(f.s(), f.si()).apply_async(countdown=3)
"""


@pytest.mark.parametrize("source", FOUND, ids=lambda source: source.split("\n")[-1].strip()[:30])
def test_what_cannot_be_carried_is_found(source):
    texts = [text for _, text in findings(source)]
    assert any(FOUND[source] in text for text in texts), texts


def test_what_can_be_carried_is_not_found():
    assert findings(dedent(CLEAN)) == []


def test_findings_have_files_and_lines(tmp_path, capsys):
    (tmp_path / "tasks.py").write_text("import celery\nfrom celery import signals\n\nCELERY_TASK_ROUTES = {1: 2}\n")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "kombu.py").write_text("import kombu\n")
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == (
        f"{tmp_path}/tasks.py:4: CELERY_TASK_ROUTES: write queue= at the decorator or the call\n"
        "Places that the bridge cannot carry: 1. Files: 1.\n"
    )


TASKS = """
    from celery import shared_task
    from celery.utils.log import get_task_logger

    @shared_task(queue="mail", autoretry_for=(OSError,), max_retries=4, retry_backoff=True)
    def send(order_id, text):
        "ä"

    @shared_task
    def plain(order_id): ...

    @shared_task
    def stays(order_id): ...
"""
NEW_TASKS = """
    from django_pglock.contrib.celery import shared_task
    from django_pglock import task
    from django_pglock.contrib.celery import get_task_logger

    @task(queue_name='mail', retry_on=(OSError,), max_attempts=5)
    def send(order_id, text):
        "ä"

    @task
    def plain(order_id): ...

    @shared_task
    def stays(order_id): ...
"""
VIEWS = """
    from shop import tasks
    from shop.tasks import plain

    def buy(order):
        plain.delay(order.pk)
        on_commit(lambda: tasks.send.delay(order.id, text=f"{order} ä"))
"""


def rewritten(*sources):
    return [*rewrite.rewritten(dict(enumerate(map(dedent, sources)))).values()]


def test_simple_tasks_and_their_calls_are_rewritten():
    stays = "\n\n    id = tasks.stays.delay(1).id\n"
    assert rewritten(TASKS, VIEWS + stays) == [
        dedent(NEW_TASKS),
        dedent(VIEWS + stays).replace("delay(o", "enqueue(o"),
    ]


@pytest.mark.parametrize(
    "use",
    [
        "plain.s(1)",
        "x = plain.delay(1)",
        "plain(1)",
        "plain.delay(order)",
        "plain.delay(when=now())",
        "plain.apply_async((1,))",
        "patch('shop.tasks.plain.delay')",
        "run(plain)",
        "async def f():\n    plain.delay(1)",
        "key = UUIDField()\nplain.delay(order.pk)",
        "class A:\n    def plain(self): return self.plain()",
    ],
)
def test_a_task_stays_if_one_use_is_not_certain(use):
    task = "from celery import shared_task\n@shared_task\ndef plain(x): ...\n"
    [new, other] = rewritten(task, use)
    assert new == task.replace("celery", "django_pglock.contrib.celery")
    assert other == use


@pytest.mark.parametrize(
    "task",
    [
        "@shared_task(bind=True)\ndef f(self): ...",
        "@shared_task(name='f')\ndef f(): ...",
        "@shared_task\ndef f(): return 1",
        "@shared_task(**OPTIONS)\ndef f(): ...",
        "@shared_task(autoretry_for=(OSError,), max_retries=None)\ndef f(): ...",
        "@shared_task(autoretry_for=(OSError,), retry_backoff=3)\ndef f(): ...",
        "@shared_task(rate_limit=10)\ndef f(): ...",
        "@shared_task(priority=3)\ndef f(): ...",
        "@other\n@shared_task\ndef f(): ...",
        "task = 1\n@shared_task\ndef f(): ...",
    ],
)
def test_a_task_stays_if_its_options_are_not_certain(task):
    assert rewritten(task) == [task]


def test_it_writes_only_what_a_person_has_seen(tmp_path, capsys, monkeypatch):
    path = tmp_path / "tasks.py"
    path.write_text("from celery import shared_task\n\n@shared_task\ndef f(): ...\n")
    for answer in ("", "y"):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        before = path.read_text()
        assert main([str(tmp_path), "--write"]) == 0
        assert "+from django_pglock import task" in capsys.readouterr().out
        assert (path.read_text() == before) == (answer == "")
    assert path.read_text() == "from django_pglock import task\n\n@task\ndef f(): ...\n"
