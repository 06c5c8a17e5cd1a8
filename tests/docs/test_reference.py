"""The reference pages contain all names of the code, and no others."""

from __future__ import annotations

import dataclasses
import re
from unittest.mock import MagicMock

from django.dispatch import Signal

from django_pglock import Lease, lock, signals
from django_pglock.locks.async_handle import AsyncHandle
from django_pglock.locks.handle import Handle
from django_pglock.locks.leases.handle import AsyncLeaseHandle, LeaseHandle
from django_pglock.loggers import WORKER
from django_pglock.management.commands import withlock
from django_pglock.tasks.claim import TaskContext
from django_pglock.tasks.fields import TaskFields
from django_pglock.tasks.states import TaskStatus
from django_pglock.worker.child.child import LEFT_BEHIND
from django_pglock.worker.parent.metrics import Metrics, attempt_families, depth_families
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "reference.md").read_text()
#: The pages that quote messages as symptoms.
PAGES_OF_SYMPTOMS = ("howto/monitoring", "howto/not_running", "inside")
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "django_pglock").rglob("*.py")))
HANDLES = (Handle, AsyncHandle, LeaseHandle, AsyncLeaseHandle)
#: What the package itself calls on handles.
OF_THE_PACKAGE = {
    "acquire",
    "detach",
    "free_from_any_thread",
    "release_from_any_thread",
    "is_disabled",
    "is_done",
    "is_open",
    "options",
    "request",
}


def section(title: str, page: str = PAGE) -> str:
    return page.partition(f"# {title}\n")[2].partition("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """Return what stands in code in the first cells of tables."""
    return re.findall(r"`([\w.]+)", "".join(re.findall(r"^\|([^|]*)\|", text, re.MULTILINE)))


def test_every_option_of_a_task_has_its_sentence():
    explained = set(re.findall(r"``(\w+)``", TaskFields.__doc__ or ""))
    own = {each.name for each in dataclasses.fields(TaskFields) if each.init} - {"func"}
    of_django = {"priority", "backend", "queue_name", "takes_context"}
    assert own - of_django - explained == set()
    assert "autoclass:: django_pglock.tasks.fields.TaskFields" in section("Options of a task")


def test_every_attribute_of_a_handle_stands_in_the_table():
    made = [lock("a")._handle(("a",)), Lease("a", ttl=60)._handle(("a",))]
    has = {name for each in [*HANDLES, *map(vars, made)] for name in ([*dir(each)] if isinstance(each, type) else each)}
    public = {name for name in has if not name.startswith("_")} - OF_THE_PACKAGE
    assert set(first_cells(section("Handles"))) - {"attribute"} == public


def test_every_attribute_of_a_context_is_shown():
    own = {name for name in vars(TaskContext) if not name.startswith("_")}
    [members] = re.findall(r"TaskContext\n   :members: (.*)", PAGE)
    assert set(members.split(", ")) == own


def test_every_signal_is_shown():
    """Sphinx shows the names that a comment explains."""
    named = {name for name, each in vars(signals).items() if isinstance(each, Signal)}
    text = (ROOT / "django_pglock" / "signals.py").read_text()
    assert set(re.findall(r"^#: .*\n(\w+) = Signal", text, re.MULTILINE)) == named


def test_every_check_stands_in_the_table():
    told = re.findall(r"[EW]0\d\d", "".join(re.findall(r"^\|([^|]*)\|", section("System checks"), re.MULTILINE)))
    assert sorted(told) == sorted(set(re.findall(r'"(?:django_pglock\.)?([EW]0\d\d)"', SOURCE)))


def test_every_logger_stands_in_the_table():
    table = section("Other loggers", (ROOT / "docs" / "logging.md").read_text())
    used = set(re.findall(r'get_logger\("(django_pglock\.\w+)"\)', SOURCE)) | {WORKER}
    assert set(first_cells(table)) == used


def test_every_metric_stands_in_the_table():
    table = section("Metrics", (ROOT / "docs" / "operations.md").read_text()).partition("\n\n")[0]
    told = re.findall(r"`([a-z_]+)(?:\{[\w, ]+\})?`", "".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)))
    metrics = Metrics(MagicMock())
    metrics.health.beat_age.return_value = 1.0
    families = (*metrics._counters(), *metrics._gauges(), *depth_families([]), *attempt_families({}))
    names = {family.name for family in families}
    assert set(told) - {"django_pglock_"} == names


def test_every_exit_code_stands_in_the_table():
    table = section("Exit codes")
    assert f"| `runlockworker` | {LEFT_BEHIND} |" in table
    assert f"| `withlock` | {withlock.EX_TEMPFAIL} |" in table
    assert f"| `withlock` | {withlock.EX_SOFTWARE} |" in table


def test_every_status_is_a_symptom_of_a_task_that_does_not_run():
    page = (ROOT / "docs" / "howto" / "not_running.md").read_text()
    assert set(re.findall(r"^\| ([A-Z]+)\b", page, re.MULTILINE)) == set(TaskStatus.values)


def test_messages_that_pages_quote_as_symptoms_are_messages_of_the_code():
    of_the_server = {"sorry, too many clients already", "permission denied"}
    messages = re.sub(r'"\s*\n\s*f?"', "", SOURCE)  # texts that continue in the next line
    pages = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in PAGES_OF_SYMPTOMS)
    # Tables and runbooks, without blocks of code.
    quoted = set(re.findall(r'"([^"\n]{12,})"', re.sub(r"```.*?```", "", pages, flags=re.DOTALL)))
    assert {"which no running worker has imported", "No worker knows this task"} <= quoted
    assert {text for text in quoted - of_the_server if text not in messages} == set()


def test_every_thread_and_session_stands_in_the_page_for_people_on_call():
    page = (ROOT / "docs" / "inside.md").read_text()
    worker = "\n".join(path.read_text() for path in (ROOT / "django_pglock" / "worker").rglob("*.py"))
    threads = set(re.findall(r'(?:name|thread_name_prefix)=f?"(lockworker-[a-z-]+[a-z])', worker))
    services = set(re.findall(r'^    name = "([a-z]+)"', worker, re.MULTILINE)) - {"service"}
    assert len(threads) >= 5
    assert len(services) == 4
    assert set(re.findall(r"`(lockworker-[a-z-]+[a-z])", page)) == threads | {f"lockworker-{name}" for name in services}
    named = set(re.findall(r'application_name="(lockworker \w+)"', worker))
    assert set(re.findall(r"^\| `(lockworker \w+)`", page, re.MULTILINE)) == named | {
        f"lockworker {name}" for name in services
    }
