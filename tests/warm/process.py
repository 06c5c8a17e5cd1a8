"""A process of the project, as ``subprocess.Popen`` shows it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.warm.parent import FAREWELL

PARENT = Path(__file__).with_name("parent.py")
ROOT = PARENT.parent.parent.parent
#: Warm parents of one process of tests at once. Each has its own environment, because Django's settings depend on it.
LIMIT = 5
#: Parts of the environment that no settings depend on: processes with the same parent differ in these.
FREE = ("PYTEST_CURRENT_TEST", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PGAPPNAME", "PGLOCK_NO_BOOTSTRAP")
#: Parts of it on which some settings depend: a child in which these differ reads these settings again.
READ_AGAIN = ("DATABASE_URL", "DEBUG", "HEARTBEAT_INTERVAL", "PAYMENTS_URL", "CHAOS_PGLOCK")
#: The settings that are read again.
SETTINGS_READ_AGAIN = ("DATABASES", "DEBUG", "DJANGO_PGLOCK", "MIGRATION_MODULES", "PAYMENTS_URL")
MODULE = "DJANGO_SETTINGS_MODULE"
#: Modules that differ only in these settings: processes with one of these modules have the same parent, which has read
#: the first.
SIMILAR = (
    "tests.settings",
    "tests.settings_later_version",
    "tests.settings_slow_beats",
    "tests.settings_transaction_scope",
)
#: Settings that do something to the process when they are read: this must not happen twice.
READ_ONCE = ("CHAOS_CLOCK", "CHAOS_MEMORY")
#: Parts of the environment on which the interpreter depends. One process has each, and a parent takes as long to start.
OF_ONE = ("WRONG_CLOCK",)


def start(arguments: Sequence[str], *, env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
    """Start ``[sys.executable, PROGRAM, *ARGUMENTS]``, or with ``"-c", CODE`` or ``"-m", MODULE``.

    ``options`` are those of ``Popen``; ``preexec_fn`` is a function of a module.

    The process is forked by a warm parent. In a project that a test has written, the parent has imported Django and
    this package, and nothing of the project: its files may change between two starts. Where coverage measures the
    process, and without ``fork``, it is a new interpreter.
    """
    is_new = any(name.startswith(("COVERAGE_PROCESS", *OF_ONE)) for name in env)
    if is_new or not hasattr(os, "fork"):
        return subprocess.Popen(arguments, env=env, **options)
    is_ours = env.get(MODULE, "").startswith(("tests.", "qa.", "example_project."))
    return (WarmProcess if is_ours else BareProcess)(arguments, env=env, **options)


class WarmParent:
    """A process that forks children, each with the same environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(PARENT), str(theirs.fileno())],
                env=environment, cwd=ROOT, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> socket.socket:
        """Start a program; return the socket that tells its process id, and its status when it has ended."""
        told, theirs = socket.socketpair()
        with theirs:
            streams, others = descriptors[:3], descriptors[3:]
            socket.send_fds(self._control, [json.dumps(request).encode()], [*streams, theirs.fileno(), *others])
        return told

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self, *, with_children: bool) -> None:
        """Let it end: at once, or with the last of its children."""
        if with_children:
            with contextlib.suppress(OSError):
                self._control.send(FAREWELL)
        self._control.close()


_parents: dict[tuple[tuple[str, str], ...], WarmParent] = {}
_closed: list[WarmParent] = []


def free_in(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the parts of an environment in which processes with the same parent may differ."""
    if any(name in environment for name in READ_ONCE):
        return FREE
    return (*FREE, *READ_AGAIN, *([MODULE] if environment.get(MODULE) in SIMILAR else []))


def parent_for(environment: Mapping[str, str]) -> WarmParent:
    """Return the warm parent with this environment; start it if there is none."""
    free = free_in(environment)
    fixed = {name: value for name, value in environment.items() if name not in free}
    if MODULE in free:
        # A parent without settings is another one.
        fixed[MODULE] = SIMILAR[0]
    key = tuple(sorted(fixed.items()))
    parent = _parents.pop(key, None)
    if parent is None or parent.has_ended():
        known = {name: value for name, value in environment.items() if name not in FREE}
        parent = WarmParent({**known, **({MODULE: SIMILAR[0]} if MODULE in free else {})})
    _parents[key] = parent
    while len(_parents) > LIMIT:
        retire(next(iter(_parents)))
    return parent


def retire(key: tuple[tuple[str, str], ...]) -> None:
    """Let a parent end with the last of its children."""
    parent = _parents.pop(key)
    parent.close(with_children=True)
    _closed[:] = [each for each in _closed if not each.has_ended()]
    _closed.append(parent)


@atexit.register
def close_all() -> None:
    for parent in _parents.values():
        parent.close(with_children=False)


class WarmProcess(subprocess.Popen[Any]):
    """A child of a warm parent. Its parent is not this process, so the socket ``_told`` stands for ``os.waitpid``."""

    def __init__(self, arguments: Sequence[str], *, env: Mapping[str, str], **options: Any) -> None:
        super().__init__(arguments, env=env, **options)

    def _execute_child(self, args: Sequence[str], *options: Any) -> None:
        before, pass_fds, folder, env = options[1], sorted(options[3]), *options[4:6]
        pipes, start_new_session = options[9:15], options[20]
        theirs = (pipes[0], pipes[3], pipes[5])
        streams = [number if pipe == -1 else pipe for number, pipe in enumerate(theirs)]
        request = {
            "arguments": args[1:],
            "folder": os.fspath(folder or os.getcwd()),
            "session": start_new_session,
            "before": before and f"{before.__module__}:{before.__qualname__}",
            "descriptors": pass_fds,
            "path": [],
        }
        self._told = self._fork(request, env, [*streams, *pass_fds])
        self.pid = self._read()
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _fork(self, request: dict[str, Any], env: Mapping[str, str], descriptors: Sequence[int]) -> socket.socket:
        return parent_for(env).fork(
            {**request, "environment": {name: env.get(name) for name in free_in(env)}}, descriptors
        )

    def _read(self, flags: int = 0) -> int:
        """Return the next number from the parent. Raises ``BlockingIOError`` if flags say so and it has none."""
        answer = self._told.recv(12, flags)
        if not answer:
            raise RuntimeError("The warm parent has ended. What it has printed says why.")
        return int(answer)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        try:
            status = self._read(socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        self._told.close()
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                if self.returncode is None:
                    ended, status = self._try_wait(os.WNOHANG)
                    if ended:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


class BareProcess(WarmProcess):
    """A child of a warm parent without settings. ``PYTHONPATH`` names the folder of its project."""

    def _fork(self, request: dict[str, Any], env: Mapping[str, str], descriptors: Sequence[int]) -> socket.socket:
        parents = {name: value for name, value in os.environ.items() if name != MODULE}
        known = [*filter(None, [parents.get("PYTHONPATH")]), str(ROOT)]
        parents |= {"PYTHONPATH": os.pathsep.join(known), "PYTHONDONTWRITEBYTECODE": "1"}
        request["environment"] = {name: env.get(name) for name in {*parents, *env}}
        request["path"] = [each for each in env["PYTHONPATH"].split(os.pathsep) if each not in known]
        return parent_for(parents).fork(request, descriptors)
