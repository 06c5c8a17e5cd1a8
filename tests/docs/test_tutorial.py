"""The tutorial, done as it stands: its blocks into its files, its commands in a shell, real clicks, a real worker.

tox builds a wheel. Then the tutorial begins with its first command, which installs this wheel into a fresh environment.
"""

from __future__ import annotations

import ensurepip
import html
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode

import environ
import psycopg
import pytest

from example_project.demo.processes import free_port
from tests.conftest import NEVER, ROOT

PAGE = (ROOT / "docs" / "start.md").read_text().partition("\n## A shop")[2]
FILES = re.findall(
    r"^```\{code-block\} python\n:caption: ([\w/.]+), [^\n]*\n\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
)
TASKS = "/admin/django_pglock/task/"
#: What the first click on a cart is answered.
FIRST = re.compile(r"Receipt \d+ follows")
ADMIN = {"username": "admin", "password": "secret"}
#: In the list of tasks, once for each receipt.
ROW = "write_receipt #"
COMMANDS = "".join(re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)).splitlines()


def test_the_tutorial_is_short():
    typed = [
        line for _, code in FILES for line in code.splitlines() if line and not line.startswith(("from", "import"))
    ]
    assert len([part for command in COMMANDS for part in command.split("&&")]) <= 8
    assert len(typed) <= 22


class Shop:
    """The reader's folder, terminals and browser."""

    def __init__(self, folder: Path, url: str, programs: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._started: list[subprocess.Popen[bytes]] = []
        self._output = (folder / "output").open("wb")
        settings = environ.Env.db_url_config(url)
        names = {"PGHOST": "HOST", "PGPORT": "PORT", "PGUSER": "USER", "PGPASSWORD": "PASSWORD"}
        own = {
            name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "DJANGO_SETTINGS_MODULE")
        }
        self._environment = {
            **own,
            **{name: str(settings[key]) for name, key in names.items() if settings.get(key)},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "DJANGO_SUPERUSER_PASSWORD": ADMIN["password"],
        }
        jar = urllib.request.HTTPCookieProcessor(CookieJar())
        self._browser = urllib.request.build_opener(jar, urllib.request.ProxyHandler({}))

    def run(self, command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, command: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            f"exec {command}", shell=True, cwd=self.folder, env=self._environment, start_new_session=True,
            stdout=self._output, stderr=self._output,
        )  # fmt: skip
        self._started.append(process)
        return process

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(NEVER)

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(NEVER)
        self._output.close()

    def get(self, path: str) -> tuple[int, str]:
        try:
            with self._browser.open(f"http://127.0.0.1:{self.port}{path}", timeout=NEVER) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as answer:
            return answer.code, answer.read().decode()

    def post(self, path: str, **form: str) -> str:
        """Fill in a form of the page, and return the page that follows."""
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', self.get(path)[1])
        assert token
        form["csrfmiddlewaretoken"] = token[1]
        with self._browser.open(f"http://127.0.0.1:{self.port}{path}", urlencode(form).encode(), timeout=NEVER) as page:
            assert page.status == 200
            return str(page.read().decode())

    def log_in(self) -> None:
        self.post(f"/admin/login/?next={TASKS}", **ADMIN, next=TASKS)

    def count(self, status: str) -> int:
        """Return the number of receipts in the list of the tasks with this status."""
        return self.get(f"{TASKS}?status__exact={status}")[1].count(ROW)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Return the folder of the programs that the reader has installed."""
    wheel = os.environ.get("TOX_PACKAGE")
    if not wheel:
        return Path(sys.executable).parent
    home = tmp_path / "environment"
    # pip runs from the wheel that comes with Python: to install it into the environment takes seconds of CPU time.
    bundled = [*Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl")]
    subprocess.run([sys.executable, "-m", "venv", *["--without-pip"][: len(bundled)], home], check=True)
    pip = f"{home / 'bin' / 'python'} {f'{bundled[0]}/pip' if bundled else '-m pip'} --quiet"
    command = COMMANDS[0].replace("python -m pip", pip).replace("django-pglock-tasks", wheel)
    subprocess.run(command, shell=True, check=True)
    return home / "bin"


@pytest.fixture
def shop(tmp_path: Path, programs: Path) -> Iterator[Shop]:
    url = os.environ["DATABASE_URL"]
    settings = environ.Env.db_url_config(url)
    given = {"host": "HOST", "port": "PORT", "dbname": "NAME", "user": "USER", "password": "PASSWORD"}
    session = psycopg.connect(
        **{name: settings[key] for name, key in given.items() if settings.get(key)}, autocommit=True
    )
    session.execute("CREATE DATABASE shop")
    folder = tmp_path / "shop"
    folder.mkdir()
    shop = Shop(folder, url, programs)
    try:
        yield shop
    finally:
        shop.close()
        session.execute("DROP DATABASE shop WITH (FORCE)")
        session.close()


def test_the_tutorial_works(shop: Shop, programs: Path, eventually: Callable[..., object]) -> None:
    install, startproject, migrate, createsuperuser, runserver, runlockworker, mkdir, test = COMMANDS
    assert install.startswith('python -m pip install "django-pglock-tasks[cron]"')
    if "TOX_PACKAGE" in os.environ:
        imported = shop.run("python -c 'import django_pglock; print(django_pglock.__file__)'")
        assert imported.startswith(str(programs.parent)), f"another package was used: {imported}"
    shop.run(startproject)
    for name, code in FILES:
        with (shop.folder / name).open("a") as file:
            file.write(code)
    shop.run(migrate)
    shop.run(f"{createsuperuser} --no-input --username admin --email a@b.example")
    shop.start(f"{runserver} {shop.port} --noreload")
    worker = shop.start(f"{runlockworker} --no-reload")
    eventually(lambda: is_up(shop), why="the server does not answer")
    assert FIRST.fullmatch(shop.get("/checkout/1/")[1])
    assert shop.get("/checkout/1/") == (200, "Order 1 is there")
    shop.log_in()
    eventually(lambda: shop.count("FAILED") == 1, why="the receipt did not fail")
    retry_in_the_admin(shop, mkdir)
    eventually(lambda: shop.count("SUCCESSFUL") == 1, why="the receipt was not written")
    assert (shop.folder / "receipts" / "1.txt").read_text() == "Paid: cart 1"
    shop.stop(worker)
    click_often(shop, 2)
    assert shop.count("READY") == 1
    shop.start(f"{runlockworker} --no-reload")
    eventually(lambda: shop.count("SUCCESSFUL") == 2, why="a task was lost")
    for path, text in {"schedule": "nightly_report", "advisorylock": "Advisory locks"}.items():
        status, page = shop.get(f"/admin/django_pglock/{path}/")
        assert (status, text in page) == (200, True), page
    shop.run(f"{test} --no-input")


def retry_in_the_admin(shop: Shop, mkdir: str) -> None:
    """See why the task has failed, repair the cause, and retry. ``qa/browser`` opens these pages in a browser."""
    _, tasks = shop.get(TASKS)
    link = re.search(r'<th class="field-[^>]*><a href="([^"]+)"', tasks)
    assert link, tasks
    _, page = shop.get(html.unescape(link[1]))
    assert "FileNotFoundError" in page
    assert "attempt 3 of 3" in page
    shop.run(mkdir)
    [task_id] = re.findall(r"/task/(\d+)/", link[1])
    shop.post(TASKS, action="retry", _selected_action=task_id)


def click_often(shop: Shop, cart: int) -> None:
    with ThreadPoolExecutor(8) as clicks:
        answers = [*clicks.map(lambda _: shop.get(f"/checkout/{cart}/"), range(8))]
    assert {status for status, _ in answers} <= {200, 409}
    later = [page for status, page in answers if status == 200 and not FIRST.fullmatch(page)]
    assert set(later) <= {f"Order {cart} is there"}
    assert sum(bool(FIRST.fullmatch(page)) for _, page in answers) == 1


def is_up(shop: Shop) -> bool:
    try:
        return shop.get("/admin/login/")[0] == 200
    except URLError:
        time.sleep(0.05)
        return False
