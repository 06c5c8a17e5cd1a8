"""The warm parent: ``python parent.py DESCRIPTOR``. It sets up Django, and forks a child for each request.

A request comes through the socket of that descriptor: what to run as JSON, and with it four descriptors, which are the
child's standard input, output and error, and a socket that is told its process id, and its status once it has ended.
More descriptors are inherited by the child with the numbers that the request says.

Python needs most of a second to import Django and the project, and a test of processes is not about that. A child is a
process as any other: it has no connection and no thread of the parent's, because the parent has none, no descriptor but
those of the request, and the signals' handlers that Python starts with. It runs a program or a module as the main
program, and ends as Python ends, but leaves its memory to the kernel: to delete all modules needs more CPU time than to
fork.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from itertools import pairwise
from typing import Any

#: What the tests send before they close the socket of a parent whose children may run on. Without it the tests have
#: ended, and so does the parent.
FAREWELL = b"farewell"
#: The most descriptors of a request, and a number that none of them has.
MOST_DESCRIPTORS, FIRST_ASIDE = 16, 200
#: Of SIGINT: a shell may have started the tests with this signal ignored.
interrupt = signal.getsignal(signal.SIGINT)


def warm_up() -> None:
    """Import what every process of the project imports. The system checks import URLs, views and templates.

    Without settings, import only what needs none: the children are processes of other projects.
    """
    import django

    if is_bare():
        import django.core.management.commands.migrate
        import django.db.backends.postgresql.base
    else:
        django.setup()
    from django.core.checks import run_checks
    from django.core.management import execute_from_command_line as _  # noqa: F401

    import django_pglock.management.commands.runlockworker  # noqa: F401

    if not is_bare():
        run_checks()
    if threading.active_count() > 1:
        raise RuntimeError("A module has started a thread, which a child would not have.")
    gc.collect()
    gc.freeze()


def is_bare() -> bool:
    """Return whether this is a parent without settings."""
    from django.conf import settings

    return not settings.configured and "DJANGO_SETTINGS_MODULE" not in os.environ


def wait_for_request(control: socket.socket) -> dict[str, Any]:
    """Fork a child for each request; return in the child."""
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children: dict[int, int] = {}
    listens = True
    while listens or children:
        ready, _, _ = select.select([woken, *([control] if listens else [])], [], [])
        if woken in ready:
            os.read(woken, 4096)
            tell_ends(children)
        if control not in ready:
            continue
        text, descriptors, _, _ = socket.recv_fds(control, 65536, MOST_DESCRIPTORS)
        if not text:
            os._exit(0)
        if text == FAREWELL:
            listens = False
            continue
        request = dict(json.loads(text))
        if (child := os.fork()) == 0:
            control.detach()
            become_child(request, descriptors)
            return request
        children[child] = descriptors.pop(3)
        os.write(children[child], b"%12d" % child)
        for each in descriptors:
            os.close(each)
    os._exit(0)


def tell_ends(children: dict[int, int]) -> None:
    """Report each child that has ended, with its status as ``os.waitpid`` returns it, to the socket of this number."""
    for pid, told in list(children.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del children[pid]
            # The process that has started it may have closed the socket.
            with contextlib.suppress(BrokenPipeError):
                os.write(told, b"%12d" % status)
            os.close(told)


def become_child(request: dict[str, Any], descriptors: list[int]) -> None:
    """Leave everything of the parent's behind but the descriptors of the request."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, interrupt)
    del descriptors[3]
    kept = dict(zip([0, 1, 2, *request["descriptors"]], descriptors, strict=True))
    # Above the numbers that they get.
    kept = {number: fcntl.fcntl(each, fcntl.F_DUPFD, FIRST_ASIDE) for number, each in kept.items()}
    for number, each in kept.items():
        os.dup2(each, number)
    highest = max(*kept.values(), FIRST_ASIDE)
    for number, following in pairwise([*sorted(kept), highest + 1]):
        os.closerange(number + 1, following)


def change_environment(changes: dict[str, str | None]) -> None:
    """Set variables, and read settings that depend on them again."""
    is_other = not is_bare() and is_read_again(changes)
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if is_other:
        read_settings_again()


def is_read_again(changes: dict[str, str | None]) -> bool:
    """Return whether settings depend on one of the changes."""
    from tests.warm.process import MODULE, READ_AGAIN

    return any(name in changes and os.environ.get(name) != changes[name] for name in (MODULE, *READ_AGAIN))


def read_settings_again() -> None:
    """Have the databases, and what else differs between processes with one parent, as the environment says now."""
    from asgiref.local import Local
    from django.conf import settings
    from django.core.signals import setting_changed
    from django.db import connections

    from tests.warm.process import SETTINGS_READ_AGAIN

    for name in list(sys.modules):
        package, _, module = name.partition(".")
        if package in ("tests", "qa", "example_project") and module.rpartition(".")[2].startswith("settings"):
            del sys.modules[name]
    read = importlib.import_module(os.environ["DJANGO_SETTINGS_MODULE"])
    for name in SETTINGS_READ_AGAIN:
        if hasattr(read, name):
            setattr(settings, name, getattr(read, name))
    setting_changed.send(None, setting="DJANGO_PGLOCK", value=settings.DJANGO_PGLOCK, enter=True)
    connections._settings = None
    vars(connections).pop("settings", None)
    connections._connections = Local(connections.thread_critical)


def run(request: dict[str, Any]) -> None:
    """Run the program, as ``python`` does with these arguments."""
    os.chdir(request["folder"])
    if request["session"]:
        os.setsid()
    if request["before"]:
        module, _, name = request["before"].partition(":")
        getattr(importlib.import_module(module), name)()
    change_environment(request["environment"])
    sys.path[1:1] = request["path"]
    program, *rest = sys.argv = request["arguments"]
    if program == "-c":
        code, *sys.argv[1:] = rest
        sys.path[0] = request["folder"]
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
    elif program == "-m":
        module, *sys.argv[1:] = rest
        sys.path[0] = request["folder"]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(program)
        runpy.run_path(program, run_name="__main__")


def run_and_end(request: dict[str, Any]) -> None:
    """Run the program and end the process. Python ends it after an exception, of which it prints the traceback."""
    code: Any = None
    try:
        run(request)
    except SystemExit as error:
        code = error.code
        if not (code is None or isinstance(code, int)):
            raise
    # In the order in which Python does it: threads, then functions that are called at the exit, then the streams.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # If the output is not read any more, Python prints an error and has an exit code for that.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit((code or 0) & 0xFF)
    sys.exit(code)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    warm_up()
    run_and_end(wait_for_request(socket.socket(fileno=int(sys.argv[1]))))
