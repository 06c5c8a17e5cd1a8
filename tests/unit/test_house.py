"""Rules of the code: imports, sizes, plans, the migration, the help of commands."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import django
import pytest
from django.core.management import call_command, get_commands, load_command_class
from django.db import migrations

import django_pglock
from django_pglock import apps
from django_pglock import migrations as package
from django_pglock.conf import Settings
from django_pglock.errors import ConfigurationError
from django_pglock.migrations._operations import PlainSQL

PACKAGE = Path(django_pglock.__file__).parent


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "migrations" not in path.parts)


TESTS = Path(__file__).parents[1]


STORE = {path.stem: path for path in (PACKAGE / "store").glob("[!_]*.py")}


def test_importing_the_package_touches_no_settings_no_model_and_no_database():
    """Decorators must work in a models.py that is loaded first, and in a script without Django's set-up."""
    code = (
        "import django_pglock, sys; from django.conf import settings; assert not settings.configured;"
        "from django_pglock import lock, try_lock, lock_view;"
        "lock('a:{x}')(lambda x: x); assert not settings.configured;"
        "import django_pglock.store.operate; assert not settings.configured;"
        "assert 'django_pglock.models' not in sys.modules"
    )
    environment = {"PATH": "", "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=environment)


def test_every_public_name_can_be_loaded_and_is_listed():
    for name in django_pglock.__all__:
        assert getattr(django_pglock, name) is not None
    assert set(django_pglock.__all__) <= set(dir(django_pglock))
    assert len(set(django_pglock.__all__)) == len(django_pglock.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = django_pglock.nonsense


def test_the_package_and_its_modules_list_the_same_public_names():
    """Type checkers know the names by ``import *``, and the program by a table."""
    listed = {name: set(import_module(f"django_pglock.{name}").__all__) for name in django_pglock._NAMES}
    # The type of what @task returns is for annotations alone.
    listed["tasks"].remove("PostgresTask")
    assert {name: set(names.split()) for name, names in django_pglock._NAMES.items()} == listed


def test_every_setting_has_a_help_text():
    for option in fields(Settings):
        assert option.metadata["help"].endswith("."), option.name


def test_no_function_is_over_60_lines_and_public_names_have_docstrings():
    """All files in one test: to start and report a test takes longer than to read a file."""
    assert [complaint for path in SOURCES for complaint in complaints(path)] == []


def complaints(path):
    tree, name = ast.parse(path.read_text()), path.relative_to(PACKAGE)
    if tree.body and not ast.get_docstring(tree):
        yield f"{name} has no docstring"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            documented = ast.get_docstring(node) or ""
            lines = node.end_lineno - node.lineno + 1 - len(documented.splitlines())
            if lines > 60:
                yield f"{name}: {node.name} has {lines} lines"
    for node in tree.body:
        is_public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
        is_overload = is_public and any(getattr(each, "id", "") == "overload" for each in node.decorator_list)
        if is_public and not is_overload and not ast.get_docstring(node):
            yield f"{name}: {node.name} is public and says nothing"


#: Statements of the store whose plan no test reads, by the reason.
WITHOUT_PLAN = {
    "it inserts rows and reads none": ("ALLOCATE_IDS", "ENQUEUE_MANY"),
    "it takes a lock, sets a limit, or notifies": (
        *("LIMIT_TICK", "LIMIT_WAITS", "LOCK_KEY", "LOCK_KEYS", "LOCK_PARENT", "NOTIFY"),
        *(
            "NOTIFY_BLOCKED",
            "NOTIFY_PARENTS",
            "NOTIFY_REQUEST",
            "RESTORE_WAITS",
            "TRY_UPKEEP_LOCK",
            "WAKE",
            "WAKE_EXCEPT",
        ),
    ),
    "it reads the catalog of the server, or its statistics": ("HELD_LOCKS", "REFUSING_KEYS", "SERVER_TIMES"),
    "its table has a row for each worker, queue, schedule or group of failures": (
        *("BEAT", "SCHEDULES", "TAKE_TICKS", "NOTE_TASKS", "LIVING_VERSIONS"),
    ),
    "it is a part of other statements, or follows one whose plan is read": (
        *("CLOCK", "FIND_GROUPS", "FIND_QUEUES", "FIRST_READY", "KEEP_IDS", "UNAWAITED"),
    ),
}


def statements(name):
    """Yield the names of the statements that a file of the store assigns."""
    module = import_module(f"django_pglock.store.{name}")
    for node in ast.parse(STORE[name].read_text()).body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            constant = getattr(target, "id", "_")
            text = getattr(module, constant, None)
            is_statement = isinstance(text, str) and re.search(r"\b(SELECT|INSERT|UPDATE|DELETE)\b", text)
            if is_statement and constant.isupper() and not constant.startswith("_"):
                yield constant


def test_the_plan_of_each_statement_of_the_store_is_tested():
    """A plan that is right on a small table may read a backlog or a long history, and a small test does not show it."""
    held = {name: set(statements(name)) for name in STORE}
    excused = {constant for constants in WITHOUT_PLAN.values() for constant in constants}
    assert excused <= set().union(*held.values()), "a statement that is excused is there"
    tests = "\n".join(path.read_text() for path in (TESTS / "plans").rglob("*.py"))
    missing = {
        f"{constant} in {name}.py"
        for name, constants in held.items()
        for constant in constants - excused
        if not re.search(rf"\b{constant}\b", tests)
    }
    assert missing == set()


@pytest.mark.django_db
def test_models_and_migrations_agree():
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)


def test_the_end_of_the_first_request_is_known_before_views_are_imported():
    code = (
        "import django\n"
        "from django.conf import settings\n"
        "settings.configure(INSTALLED_APPS=['django.contrib.contenttypes', 'django_pglock'],"
        " DATABASES={'default': {'ENGINE': 'django.db.backends.postgresql', 'NAME': 'x'}})\n"
        "django.setup()\n"
        "from django.core.signals import request_started\n"
        "assert 'django_pglock.locks.responses' in [key[0] for key, *_ in request_started.receivers]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Before the first release there is one migration, which makes everything.


def test_the_only_migration_creates_and_changes_nothing():
    [name] = [each.name for each in pkgutil.iter_modules(package.__path__) if each.name[0] != "_"]
    only = import_module(f"{package.__name__}.{name}").Migration
    assert name == "0001_initial"
    assert only.initial
    assert {type(each) for each in only.operations} == {migrations.CreateModel, PlainSQL}


# What the app requires before Django imports any models. In real projects: qa/projects/test_small_projects.py.


@pytest.mark.parametrize(("version", "is_refused"), [((5, 2, 0), True), ((6, 0, 0), False)])
def test_django_5_2_without_the_backport_is_told_what_to_install(monkeypatch, version, is_refused):
    monkeypatch.setattr(django, "VERSION", version)
    monkeypatch.setattr(apps, "find_spec", lambda name: None)
    if not is_refused:
        apps.require_django_tasks()
        return
    with pytest.raises(ConfigurationError, match=r"pip install 'django-tasks>=0\.12', or upgrade to Django 6\.0"):
        apps.require_django_tasks()


# Every command of the package and of the example project prints its help.


OURS = sorted(
    (app, name) for name, app in get_commands().items() if app.startswith(("django_pglock", "example_project"))
)


@pytest.mark.parametrize(("app", "name"), OURS)
def test_help_is_printed(app, name, capsys):
    with pytest.raises(SystemExit) as ended:
        load_command_class(app, name).create_parser("manage.py", name).parse_args(["--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 5
