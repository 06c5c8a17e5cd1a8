"""Projects of their own: written to a folder, run by their own ``manage.py`` on a database of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any, ClassVar
from uuid import uuid4

import psycopg
import pytest
from django.db import connections

from tests.conftest import NEVER, ROOT
from tests.warm.process import start

MANAGE = """
import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
    execute_from_command_line(sys.argv)
"""
SETTINGS = """
SECRET_KEY = "only-for-this-test"
USE_TZ = True
POSTGRES = {server!r}
SQLITE = {{"ENGINE": "django.db.backends.sqlite3", "NAME": {sqlite!r}}}
DATABASES = {{"default": POSTGRES}}
INSTALLED_APPS = ["django_pglock"]
TASKS = {{"default": {{"BACKEND": "django_pglock.backend.PostgresBackend", "QUEUES": []}}}}
DJANGO_PGLOCK = {{"HEARTBEAT_INTERVAL": 1.0}}
{settings}
"""


@dataclass
class Project:
    """A folder with a ``manage.py``, and the name of its database in PostgreSQL."""

    folder: Path
    database: str
    start: ClassVar[Callable[..., subprocess.Popen[Any]]] = staticmethod(start)

    def write(self, **files: str) -> None:
        """Write Python modules by their names; two underscores stand for a folder: ``shop__models``."""
        for name, text in files.items():
            path = self.folder / f"{name.replace('__', '/')}.py"
            if path.parent != self.folder:
                path.parent.mkdir(exist_ok=True)
                (path.parent / "__init__.py").touch()
            path.write_text(dedent(text))

    def run(self, *arguments: str, fails: bool = False) -> str:
        """Run ``python`` with the arguments behind it in the folder; return what it has printed.

        It is forked by a process that has imported Django and this package, and nothing else.
        """
        path = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
        environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
        process = self.start(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**environment, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with process:
            out, err = process.communicate(timeout=NEVER)
        assert bool(process.returncode) == fails, f"{arguments} returned {process.returncode}:\n{out}{err}"
        return out + err

    def manage(self, *arguments: str, **options: Any) -> str:
        """Run ``manage.py`` with these arguments; return what it has printed."""
        return self.run("manage.py", *arguments, **options)

    def manage_each(self, *commands: str) -> list[str]:
        """Run management commands in one process, which takes less than one each; return what each has printed."""
        code = f"""
            from django.core.management import call_command

            for command in {commands!r}:
                call_command(*command.split())
                print(chr(0), end="", flush=True)
        """
        return self.python(code).split("\0")

    def python(self, code: str, **options: Any) -> str:
        """Run code in the project, as ``manage.py shell`` does; return what it has printed."""
        setup = "import os; os.environ['DJANGO_SETTINGS_MODULE'] = 'settings'; import django; django.setup()\n"
        return self.run("-c", setup + dedent(code), **options)

    def session(self) -> psycopg.Connection[Any]:
        """Return a session in the project's database."""
        return session_in(self.database)

    def tables(self) -> set[str]:
        """Return the names of our tables and views in the project's database."""
        with self.session() as session:
            found = session.execute("SELECT relname FROM pg_class WHERE relkind IN ('r', 'v', 'p')")
            return {name for (name,) in found if name.startswith("django_pglock_")}


def server(name: str) -> dict[str, Any]:
    """Return the settings of a database of the tests' server."""
    settings = connections.settings["default"]
    known = {key: settings[key] for key in ("ENGINE", "HOST", "PORT", "USER", "PASSWORD")}
    return {**known, "NAME": name}


def session_in(name: str) -> psycopg.Connection[Any]:
    """Return a session in a database of the tests' server."""
    settings = server(name)
    parameters = {key: settings[key.upper()] or None for key in ("host", "port", "user", "password")}
    return psycopg.connect(**parameters, dbname=name, autocommit=True)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Callable[..., Project]]:
    """Write a project: ``settings`` are added to those above, ``files`` are its modules. One database for each."""
    made: list[str] = []

    def write(*, settings: str = "", **files: str) -> Project:
        name = f"project_{uuid4().hex}"
        folder = tmp_path / name
        folder.mkdir()
        with session_in("postgres") as session:
            session.execute(f"CREATE DATABASE {name}")
        made.append(name)
        written = Project(folder, name)
        text = SETTINGS.format(server=server(name), sqlite=str(folder / "legacy.sqlite3"), settings=dedent(settings))
        written.write(manage=MANAGE, settings=text, **files)
        return written

    yield write
    with session_in("postgres") as session:
        for name in made:
            # A test runner that was interrupted leaves its own beside it, and copies of that.
            left = session.execute("SELECT datname FROM pg_database WHERE datname LIKE %s", [f"%{name}%"]).fetchall()
            for (database,) in left:
                session.execute(f"DROP DATABASE {database} WITH (FORCE)")
