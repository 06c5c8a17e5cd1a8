"""What a contestant is: a class for the driver, and a program that runs in the contestant's own environment.

Each module beside this one has both. The driver imports it for the class; ``python -m bench.contestants.<name> VERB``
runs the rest with the contestant's own packages, which are therefore imported inside of the functions. The verbs:

- ``setup`` makes the schema;
- ``many COUNT [FUNCTION [ARGUMENT]]`` enqueues in bulk, by the best call that there is, and prints the seconds;
- ``keyed COUNT FUNCTION KEYS [SECONDS]`` enqueues in bulk calls with so many keys, in turn, and prints the
  seconds; the functions are ``locked`` and ``locked_sleep``, of which one of a key runs at a time, and ``unique``, of
  which one of a key waits; ``locked_sleep`` waits so many seconds;
- ``singles COUNT`` enqueues one by one and prints the seconds;
- ``stamps COUNT`` enqueues with random pauses, each with the time of day, which the function compares with its own;
- ``worker [OPTION...]`` runs tasks.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Kinds of tasks that wait: a plain function, one in a transaction, a coroutine, and one with a lock key.
PLAIN, ATOMIC, COROUTINE, LOCKED = "plain", "atomic", "coroutine", "locked"

#: Enqueued before the clock starts: connections, imports, caches.
WARM_UP = 5


class Failed(Exception):
    """A contestant could not be installed, or did not do what it was asked; the text says why."""


class Contestant:
    """A queue, as the driver sees it. What is no Python program overrides ``install``, ``command`` and ``version``."""

    #: What the tables call it.
    name = ""
    #: What pip installs into its virtual environment; nothing: it runs in the driver's own.
    packages: Sequence[str] = ()
    #: How many times fewer tasks it gets where rates are compared, so that a round ends.
    slowness = 1
    #: Selects one row for each task of a function, named by a LIKE pattern, that is not finished.
    unfinished = ""
    #: The function of each kind of tasks that wait. A kind that is not here cannot be run.
    naps: Mapping[str, str] = {PLAIN: "sleep"}

    def __init__(self, cache: Path) -> None:
        #: Where it may install what it needs.
        self.home = cache / self.key

    @property
    def key(self) -> str:
        """The name of its module, its database and its folder."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def python(self) -> str:
        """The interpreter that runs its program."""
        return str(self.home / "bin" / "python") if self.packages else sys.executable

    @property
    def command(self) -> list[str]:
        """Its program, to which a verb is added."""
        return [self.python, "-m", type(self).__module__]

    def worker(self, *options: str) -> list[str]:
        """Return the command line of one worker process."""
        return [*self.command, "worker", *options]

    def at_once(self, count: int) -> list[str]:
        """Return the options of a worker process that runs so many tasks at once."""
        return [str(count)]

    @property
    def environment(self) -> dict[str, str]:
        """What its processes need to find besides the database."""
        return {}

    def install(self) -> None:
        """Make its environment, on first use."""
        if self.packages and not (self.home / "installed").exists():
            venv.create(self.home, with_pip=True, clear=True)
            run([self.python, "-m", "pip", "install", "--quiet", *self.packages], timeout=600)
            (self.home / "installed").touch()

    def version(self) -> str:
        """Return the versions of what was installed."""
        names = [re.split(r"[\[=]", package)[0] for package in self.packages]
        lines = "; ".join(f"print({name!r}, version({name!r}))" for name in names)
        return run([self.python, "-c", f"from importlib.metadata import version; {lines}"]).replace("\n", ", ")

    def left(self, database: Any, function: str) -> int:
        """Return how many tasks of a function are not finished."""
        return database.execute(f"SELECT count(*) FROM ({self.unfinished}) AS t", (function,)).fetchone()[0]

    def refresh(self) -> None:
        """Forget all tasks that are not in the database, which is made anew by the driver."""

    def close(self) -> None:
        """End whatever was started for all rounds."""


def run(command: Sequence[str], *, timeout: float = 300, **more: Any) -> str:
    """Run a command and return what it prints. Raises ``Failed`` with its last words."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **more)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(f"{Path(command[0]).name}: {error}") from None
    if done.returncode:
        raise Failed(last_words(done.stderr or done.stdout) or f"{' '.join(command)} ended with {done.returncode}")
    return done.stdout.strip()


def last_words(text: str) -> str:
    """Return the last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


# The program's side


def nothing() -> None:
    """Do nothing."""


def small() -> dict[str, Any]:
    """Return what a step does: a little."""
    return {"charge": "ch_1234", "paid": True}


def sleep(seconds: float) -> None:
    """Wait, as a task does that waits for another service."""
    time.sleep(seconds)


def stamp(sent: float) -> None:
    """Note how long ago ``sent`` is."""
    seconds = time.time() - sent
    with open(os.environ["BENCH_STAMPS"], "a") as file:
        file.write(f"{seconds}\n")


def main(
    *,
    setup: Callable[[], None],
    one: Callable[..., Any],
    many: Callable[..., Any],
    keyed: Callable[..., Any] | None = None,
    worker: Callable[..., Any] | None = None,
) -> None:
    """Do what the command line says. ``one`` takes a function's name and arguments; ``many``, a count before them;
    ``keyed``, a count, a function's name, the number of keys and further arguments.
    """
    verb, *words = sys.argv[1:]
    if verb == "setup":
        setup()
    elif verb == "many":
        count, function, *arguments = [*words, "nothing"] if len(words) == 1 else words
        print(timed(lambda: many(int(count), function, *map(float, arguments))))
    elif verb == "keyed" and keyed is not None:
        print(timed(lambda: keyed(int(words[0]), words[1], int(words[2]), *map(float, words[3:]))))
    elif verb == "singles":
        repeat(WARM_UP, lambda: one("nothing"))
        print(timed(lambda: repeat(int(words[0]), lambda: one("nothing"))))
    elif verb == "stamps":
        repeat(WARM_UP + int(words[0]), lambda: (time.sleep(random.uniform(0.02, 0.2)), one("stamp", time.time())))
    elif worker is not None:
        worker(*words)


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def repeat(times: int, call: Callable[[], Any]) -> None:
    """Call again and again."""
    for _ in range(times):
        call()
