"""The warm parent: ``python parent.py DESCRIPTOR``. It sets up Django, and forks a child for each request.

A request comes through the socket of that descriptor: what to run as JSON, and with it four descriptors, which are the
child's standard input, output and error, and a socket that is told its process id, and its status once it has ended.

Python needs most of a second to import Django and the project, and a test of processes is not about that. A child is a
process as any other: it has no connection and no thread of the parent's, because the parent has none, no descriptor but
the three, and the signals' handlers that Python starts with. It runs a program or a module as the main program, and
ends as Python ends.
"""

from __future__ import annotations

import contextlib
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
from typing import Any

#: What the tests send before they close the socket of a parent whose children may run on. Without it the tests have
#: ended, and so does the parent.
FAREWELL = b"farewell"
#: Of SIGINT: a shell may have started the tests with this signal ignored.
interrupt = signal.getsignal(signal.SIGINT)


def warm_up() -> None:
    """Import what every process of the project imports."""
    import django

    django.setup()
    from django.core.management import execute_from_command_line as _  # noqa: F401

    import django_pglock.management.commands.runlockworker  # noqa: F401

    if threading.active_count() > 1:
        raise RuntimeError("A module has started a thread, which a child would not have.")
    gc.collect()
    gc.freeze()


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
        if control in ready:
            text, descriptors, _, _ = socket.recv_fds(control, 65536, 4)
            if not text:
                break
            listens = text != FAREWELL
            if listens and (child := os.fork()) == 0:
                become_child(control, descriptors, last=max(control.fileno(), waker, *descriptors, *children.values()))
                return dict(json.loads(text))
            if listens:
                *streams, told = descriptors
                children[child] = told
                os.write(told, b"%12d" % child)
                for stream in streams:
                    os.close(stream)
    os._exit(0)


def tell_ends(children: dict[int, int]) -> None:
    """Tell of each child that has ended, with its status as ``os.waitpid`` returns it."""
    for child, told in list(children.items()):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            del children[child]
            # Whoever has started it may not want to know any more.
            with contextlib.suppress(BrokenPipeError):
                os.write(told, b"%12d" % status)
            os.close(told)


def become_child(control: socket.socket, descriptors: list[int], *, last: int) -> None:
    """Leave everything of the parent's behind. ``last`` is its highest descriptor."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, interrupt)
    control.detach()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    os.closerange(3, last + 1)


def run(request: dict[str, Any]) -> None:
    """Run the program, as ``python`` does with these arguments."""
    os.chdir(request["folder"])
    if request["session"]:
        os.setsid()
    if request["before"]:
        module, _, name = request["before"].partition(":")
        getattr(importlib.import_module(module), name)()
    for name, value in request["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    program, *rest = sys.argv = request["arguments"]
    if program == "-c":
        code, *sys.argv[1:] = rest
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
    elif program == "-m":
        module, *sys.argv[1:] = rest
        sys.path[0] = request["folder"]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(program)
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    warm_up()
    run(wait_for_request(socket.socket(fileno=int(sys.argv[1]))))
