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
    require_installed()
    if sys.argv[1:2] == ["test"]:
        run_tests()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    with_database(run)


def run_tests():
    """Run pytest: the tests of tests/quick.txt, all with ``--all``, or what other arguments say, which are its own."""
    import pytest

    os.chdir(ROOT)
    arguments = [each for each in sys.argv[2:] if each != "--all"]
    if len(sys.argv) == 2:
        arguments = ["@tests/quick.txt"]
        print("These are the quick tests. All of them: python3 manage.py test --all", file=sys.stderr, flush=True)
    sys.exit(pytest.main(arguments))


def run():
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


def with_database(function):
    """Run a demo on a private PostgreSQL, unless DATABASE_URL names one. The tests start their own."""
    wants_help = {"-h", "--help"}.intersection(sys.argv)
    is_demo = sys.argv[1:2] == ["demo"] or (sys.argv[1:2] == ["systems"] and len(sys.argv) > 2)
    if not is_demo or "DATABASE_URL" in os.environ or wants_help:
        function()
        return
    from example_project.postgres import NoPostgres, PrivatePostgres

    try:
        with PrivatePostgres() as server:
            os.environ["DATABASE_URL"] = server.url
            function()
    except NoPostgres as error:
        sys.exit(str(error))


def needs_venv():
    """Say whether this Python has to hand over to the one in .venv: it is in no environment and has no project.

    A Django alone is not enough: the one that Debian installs for the whole machine is too old for us.
    """
    if os.environ.get("PGLOCK_NO_BOOTSTRAP") or sys.prefix != sys.base_prefix:
        return False
    if sys.version_info < (3, 10):
        return True
    from importlib.metadata import PackageNotFoundError, version

    try:
        version("django-pglock-tasks")
    except PackageNotFoundError:
        return True
    return bool(missing())


def missing():
    """Return what this Python lacks for the command that was asked for."""
    from importlib.util import find_spec

    wanted = ["django", "psycopg", "environ", "pgtrigger"]
    wanted += ["pytest", "pytest_django"] if sys.argv[1:2] == ["test"] else []
    return [name for name in wanted if find_spec(name) is None]


def require_installed():
    """End with what to type when an environment of the user's own is not complete."""
    if missing():
        sys.exit(
            "%s has no %s. Install the project with its extras into it:\n"
            "  %s -m pip install -e '.[demo,test]'" % (sys.executable, ", ".join(missing()), sys.executable)
        )


def make_venv():
    """Make .venv and install the project with its extras, unless that was done for this very pyproject.toml.

    The mark that all went well comes last. Whoever was interrupted before it just starts again.
    """
    if sys.version_info < (3, 10):
        sys.exit("django_pglock needs Python 3.10 or newer; this is %d.%d." % sys.version_info[:2])
    if read(READY) == wanted() and os.path.exists(PYTHON):
        return
    for place in (ROOT, HOME):
        if os.path.exists(place) and not os.access(place, os.W_OK):
            sys.exit("%s belongs to somebody else. Copy the project to a folder of your own and try again." % place)
    print("First run: making .venv and installing (once, about 15 seconds) ...", file=sys.stderr, flush=True)
    try:
        create()
        install()
        with open(READY, "w") as ready:
            ready.write(wanted())
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit("Making .venv failed (%s). Mend it, or remove %s, and try again." % (error, HOME))


def create():
    """Make .venv, or make one whole that was left half-made."""
    made_for = read(READY).split()[:1]
    if os.path.lexists(HOME) and (not os.path.exists(PYTHON) or made_for not in ([], wanted().split()[:1])):
        # Its Python is gone or another one by now; nothing in it would be found.
        shutil.rmtree(HOME)
    if uv():
        if not os.path.exists(PYTHON):
            subprocess.run([uv(), "venv", "--quiet", "--python", sys.executable, HOME], check=True)
        return
    require_ensurepip()
    if not os.path.exists(PYTHON):
        import venv

        venv.create(HOME, with_pip=True, symlinks=os.name != "nt")
    elif not has_pip():
        subprocess.run([PYTHON, "-m", "ensurepip", "--default-pip"], stdout=subprocess.DEVNULL, check=True)


def has_pip():
    """Say whether .venv has a pip: not when uv made it, nor when somebody was interrupted while making it."""
    return subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0


def require_ensurepip():
    """End with the package to install where a system keeps venv and ensurepip apart from Python."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        sys.exit(
            "This Python cannot make virtual environments: its ensurepip is missing.\n"
            "Install it with:  sudo apt install python%d.%d-venv   (Debian, Ubuntu)\n"
            "Then try again." % sys.version_info[:2]
        )


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
        return "%d.%d %s" % (sys.version_info[:2] + (hashlib.sha256(project.read()).hexdigest(),))


def read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
