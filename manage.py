#!/usr/bin/env python3
"""Django's command line for the example project.

The first use makes ``.venv`` beside this file and installs the project into it; later uses find it there. Needs
nothing but Python 3.10 with venv. ``PGLOCK_NO_BOOTSTRAP=1`` turns that off.
"""

import hashlib
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.abspath(__file__))
HOME = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(HOME, "Scripts", "python.exe") if os.name == "nt" else os.path.join(HOME, "bin", "python")
READY = os.path.join(HOME, ".ready")


def main():
    if needs_venv():
        make_venv()
        os.execv(PYTHON, [PYTHON] + sys.argv)
    if sys.argv[1:2] == ["test"]:
        run_tests()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    with_database(run)


def run_tests():
    """Run pytest: every argument behind ``manage.py test`` is its own."""
    import pytest

    os.chdir(ROOT)
    sys.exit(pytest.main(sys.argv[2:]))


def run():
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


def with_database(function):
    """Run the demo on a private PostgreSQL, unless DATABASE_URL names one. The tests start their own."""
    if sys.argv[1:2] == ["demo"] and "DATABASE_URL" not in os.environ and "--help" not in sys.argv:
        from example_project.postgres import PrivatePostgres

        with PrivatePostgres() as server:
            os.environ["DATABASE_URL"] = server.url
            function()
    else:
        function()


def needs_venv():
    """Say whether this Python has to hand over to the one in .venv: outside any environment, without Django."""
    if os.environ.get("PGLOCK_NO_BOOTSTRAP") or sys.prefix != sys.base_prefix:
        return False
    try:
        import django  # noqa: F401
    except ImportError:
        return True
    return False


def make_venv():
    """Make .venv and install the project with its extras, unless that was done for this very pyproject.toml."""
    if sys.version_info < (3, 10):
        sys.exit("django_pglock needs Python 3.10 or newer; this is %d.%d." % sys.version_info[:2])
    if read(READY) == wanted() and os.path.exists(PYTHON):
        return
    print("First run: making .venv and installing (once, about 15 seconds) ...", file=sys.stderr, flush=True)
    try:
        if not os.path.exists(PYTHON):
            create()
        install()
    except PermissionError as error:
        sys.exit("Cannot write to %s (%s). Copy the project to a folder of your own and try again." % (ROOT, error))
    with open(READY, "w") as ready:
        ready.write(wanted())


def create():
    if uv():
        subprocess.run([uv(), "venv", "--quiet", "--python", sys.executable, HOME], check=True)
        return
    try:
        import ensurepip  # noqa: F401
        import venv
    except ImportError:
        package = "python%d.%d-venv" % sys.version_info[:2]
        sys.exit(
            "This Python cannot make virtual environments: its ensurepip is missing.\n"
            "Install it with:  sudo apt install %s   (Debian, Ubuntu)\n"
            "Then try again." % package
        )
    venv.create(HOME, with_pip=True, clear=True)


def install():
    project = ROOT + "[demo,test]"
    if uv():
        command = [uv(), "pip", "install", "--quiet", "--python", PYTHON, "-e", project]
    else:
        command = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-e", project]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        sys.exit("Installing into .venv failed; the lines above say why. Mend it and try again.")


def uv():
    return shutil.which("uv")


def wanted():
    """What .venv was made for: this Python and this pyproject.toml."""
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as project:
        return "%s %s" % (sys.version.split()[0], hashlib.sha256(project.read()).hexdigest())


def read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
