#!/usr/bin/env python3
"""Django's command line for the example project.

The first use makes ``.venv`` beside this file and installs the project into it, and the first ``test`` adds what only
the tests need; later uses find both there. Needs nothing but Python 3.10 with venv. ``PGLOCK_NO_BOOTSTRAP=1`` turns
that off.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys

ROOT = os.path.dirname(os.path.abspath(__file__))
HOME = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(HOME, "Scripts", "python.exe") if os.name == "nt" else os.path.join(HOME, "bin", "python")
READY = os.path.join(HOME, ".ready")
#: The temporary files of ensurepip, pip and uv, which would be left behind if they are killed.
TEMPORARY = os.path.join(HOME, ".tmp")
#: Ends colours and shows the cursor: pip hides it while it draws a bar, and is killed before it can show it again.
PLAIN_TERMINAL = "\033[0m\033[?25h"
#: The exit code of a program that Ctrl-C has ended.
INTERRUPTED = 130


def main():
    """Run the command. Ctrl-C ends it with a sentence, whatever it does at that moment."""
    try:
        prepare_and_run()
    except KeyboardInterrupt:
        sys.stdout.flush()
        print("\nStopped by Ctrl-C. Nothing that this command has started is left behind.", file=sys.stderr)
        sys.exit(INTERRUPTED)


def prepare_and_run():
    if needs_venv():
        make_venv()
        os.execv(PYTHON, [PYTHON] + sys.argv)
    require_installed()
    if sys.argv[1:2] == ["test"]:
        run_tests()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    with_database(run)


def run_tests():
    """Run pytest: all of tests/ in three processes, or what the arguments say, which are pytest's."""
    import pytest

    os.chdir(ROOT)
    # The tests start hundreds of processes. Without files of compiled code each would compile the project again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    sys.exit(pytest.main(sys.argv[2:] or ["-q", "-n", "3", "--dist", "loadfile", "tests"]))


def run():
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


def with_database(function):
    """Run a demo on a private PostgreSQL, unless DATABASE_URL names one. The tests start their own."""
    wants_help = {"-h", "--help"}.intersection(sys.argv)
    is_demo = sys.argv[1:2] == ["demo"] or (sys.argv[1:2] == ["systems"] and len(sys.argv) > 2)
    if not is_demo or wants_help:
        function()
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Such as a terminal that is closed. "nohup" has SIGHUP ignored.
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    from example_project.postgres import NoPostgres, PrivatePostgres

    try:
        if "DATABASE_URL" in os.environ:
            from example_project.database_url import require_postgres

            require_postgres(os.environ["DATABASE_URL"])
            function()
            return
        print("Starting a private PostgreSQL. All takes less than a minute.", file=sys.stderr, flush=True)
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

    needed = ["django", "psycopg", "environ"] + (["pytest", "pytest_django"] if "test" in extras() else [])
    return [name for name in needed if find_spec(name) is None]


def extras():
    """Return the extras of the project that the command needs."""
    return ["demo", "test"] if sys.argv[1:2] == ["test"] else ["demo"]


def require_installed():
    """End with what to type when an environment of the user's own is not complete."""
    if missing():
        sys.exit(
            "%s has no %s. Install the project with its extras into it:\n"
            "  %s -m pip install -e '.[%s]'"
            % (sys.executable, ", ".join(missing()), sys.executable, ",".join(extras()))
        )


def make_venv():
    """Make .venv and install the extras that are missing in it, for this very pyproject.toml.

    The mark that all went well comes last. Whoever was interrupted before it just starts again.
    """
    if sys.version_info < (3, 10):
        sys.exit("django_pglock needs Python 3.10 or newer; this is %d.%d." % sys.version_info[:2])
    found = extras_installed()
    if set(extras()) <= set(found):
        return
    for place in (ROOT, HOME):
        if os.path.exists(place) and not os.access(place, os.W_OK):
            sys.exit("%s cannot be written. Copy the project to a folder of your own and try again." % place)
    amount = (
        "about 60 packages (once, some minutes)" if "test" in extras() else "about 20 packages (once, half a minute)"
    )
    print("First run: making .venv and installing %s ..." % amount, file=sys.stderr, flush=True)
    is_new = not os.path.lexists(HOME)
    try:
        create()
        names = sorted({*found, *extras()})
        install(names)
        with open(READY, "w") as ready:
            ready.write(" ".join(made_for() + [",".join(names)]))
    except KeyboardInterrupt:
        shutil.rmtree(HOME if is_new else TEMPORARY, ignore_errors=True)
        raise
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit("Making .venv failed (%s). Mend it, or remove %s, and try again." % (error, HOME))


def extras_installed():
    """Return the extras that .venv has for this Python and this pyproject.toml, as its mark says."""
    mark = read(READY).split()
    return mark[2].split(",") if mark[:2] == made_for() and len(mark) == 3 and os.path.exists(PYTHON) else []


def create():
    """Make .venv, or make one whole that was left half-made."""
    version = read(READY).split()[:1]
    if os.path.lexists(HOME) and (not os.path.exists(PYTHON) or version not in ([], made_for()[:1])):
        # Its Python is gone or another one by now; nothing in it would be found.
        shutil.rmtree(HOME)
    if uv():
        if not os.path.exists(PYTHON):
            run_alone([uv(), "venv", "--quiet", "--python", sys.executable, HOME])
        return
    require_ensurepip()
    if not os.path.exists(PYTHON):
        run_alone([sys.executable, "-m", "venv", "--without-pip", HOME])
    if not has_pip():
        run_alone([PYTHON, "-m", "ensurepip", "--default-pip"], stdout=subprocess.DEVNULL, env=temporary_inside())


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


def install(names):
    """Install the project with these extras, and show the progress of pip or uv."""
    project = "%s[%s]" % (ROOT, ",".join(names))
    if uv():
        command = [uv(), "pip", "install", "--python", PYTHON, "-e", project]
    else:
        command = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "-e", project]
    try:
        run_alone(command, stdout=sys.stderr, env=temporary_inside())
    except subprocess.CalledProcessError:
        sys.exit(
            "Installing into .venv failed; the lines above say why. Without a network, let a machine that has one fill "
            "a folder (pip download -d FOLDER '.[%s]' hatchling editables), and try again with %s_NO_INDEX=1 "
            "%s_FIND_LINKS=FOLDER." % ((",".join(names),) + ("UV" if uv() else "PIP",) * 2)
        )
    shutil.rmtree(TEMPORARY, ignore_errors=True)


def temporary_inside():
    """Return an environment in which programs write their temporary files to a folder of .venv."""
    os.makedirs(TEMPORARY, exist_ok=True)
    return dict(os.environ, TMPDIR=TEMPORARY)


def run_alone(command, **options):
    """Run a program out of reach of Ctrl-C on the terminal, and kill it with all it has started if we are interrupted.

    It would write a traceback of its own about the Ctrl-C. Raises CalledProcessError if it fails.
    """
    interrupts = []
    before = signal.signal(signal.SIGINT, lambda *about: interrupts.append(about))
    try:
        # A KeyboardInterrupt in here would lose the child.
        child = subprocess.Popen(command, start_new_session=True, **options)
    except BaseException:
        signal.signal(signal.SIGINT, before)
        raise
    try:
        # From here on a KeyboardInterrupt may come at any moment.
        signal.signal(signal.SIGINT, before)
        if interrupts:
            signal.raise_signal(signal.SIGINT)
        code = wait_aloud(child)
    except BaseException:
        if os.name == "nt":
            child.kill()
        else:
            kill_group(child.pid)
        child.wait()
        if sys.stderr.isatty():
            sys.stderr.write(PLAIN_TERMINAL)
        raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def wait_aloud(child):
    """Wait for a program. Say now and then that it is at work: pip is silent while it unpacks."""
    seconds = 0
    while True:
        try:
            return child.wait(4)
        except subprocess.TimeoutExpired:
            seconds += 4
            print("  ... %d s" % seconds, file=sys.stderr, flush=True)


def kill_group(leader):
    """Kill all processes of a group. Its leader may have ended, because wait() is patient for a moment at Ctrl-C."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def uv():
    return shutil.which("uv")


def made_for():
    """What .venv is made for: this Python and this pyproject.toml."""
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as project:
        return ["%d.%d" % sys.version_info[:2], hashlib.sha256(project.read()).hexdigest()]


def read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
