"""How ``manage.py`` makes its .venv: from nothing, from an unfinished .venv, from a .venv made for something else."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.acceptance


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
