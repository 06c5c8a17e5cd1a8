"""django-silk: it replaces ``SQLCompiler.execute_sql`` and notes what querysets ask, with the plan of each statement.

It does not note what is sent with ``cursor.execute()``, so its pages show no statements of locks and calls. The tests
show that both work while it asks for plans and writes its rows.
"""

from __future__ import annotations

from django.test import Client
from silk.models import Request, SQLQuery

from django_pglock.models import AdvisoryLock, Task
from qa.foreign.sample.models import Letter


def test_requests_with_locks_are_noted():
    before = Letter.objects.count()
    for number in range(3):
        assert Client().get("/post/", {"text": f"{number} is 100%"}).status_code == 200
    assert Letter.objects.count() == before + 3
    assert Task.objects.count() == 3
    assert Request.objects.filter(path="/post/").count() == 3


def test_the_plan_is_asked_for_while_the_lock_is_held():
    assert Client().get("/page/").status_code == 200
    [statement] = SQLQuery.objects.filter(request__path="/page/")
    assert "COUNT(*)" in statement.query
    assert "sample_letter" in statement.analysis
    assert not AdvisoryLock.objects.held().exists()
