"""The small Celery project of the documentation does the same before and after it was moved."""

from __future__ import annotations

import re
import sys
import types

import pytest

from django_pglock.testing import run_tasks
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "from_queues.md").read_text()


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("own_registry")
def test_the_celery_page_shows_tasks_with_the_same_effect(monkeypatch):
    module = types.ModuleType("shop_of_the_documentation")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(code, "from_queues.md", "exec"), module.__dict__)
    shop = vars(module)
    shop["app"].conf.update(task_always_eager=True, task_eager_propagates=True)
    shop["pay_with_celery"](1)
    shop["pay"](2)
    assert shop["sent"] == [1]
    run_tasks()
    assert shop["sent"] == [1, 2]
    assert shop["report_by_celery"]() == shop["report"].call() == "2 receipts"
    [there] = shop["app"].conf.beat_schedule.values()
    assert shop["report"].cron == f"{min(there['schedule'].minute)} {min(there['schedule'].hour)} * * *"
