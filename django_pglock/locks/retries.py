"""One thread that asks again and again until something is done, such as the release of a lock.

It starts with the first call. It is a thread and not an event loop: if gevent has replaced threads by greenlets, and
one greenlet ran an event loop, Django would treat all greenlets as coroutines.
"""

from __future__ import annotations

import os
from _thread import start_new_thread
from collections.abc import Callable
from queue import Empty, SimpleQueue

from django_pglock.loggers import get_logger

logger = get_logger("django_pglock.locks")

#: Seconds until the first attempt, and the most seconds between two attempts. The pause is doubled each time.
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
Attempt = Callable[[], bool]
#: The process with the thread that serves the queue. A forked process has neither.
_process = 0
_attempts: SimpleQueue[Attempt] = SimpleQueue()


def retry(attempt: Attempt) -> None:
    """Call ``attempt`` from time to time in another thread, until it returns True.

    Takes no lock and does not wait, so it may be called in a destructor. Equal attempts count as one.
    """
    global _process, _attempts
    if _process != os.getpid():
        # If two threads begin at once, there are two queues, and both are served.
        attempts: SimpleQueue[Attempt] = SimpleQueue()
        start_new_thread(_serve, (attempts,))
        _attempts, _process = attempts, os.getpid()
    _attempts.put(attempt)


def _serve(attempts: SimpleQueue[Attempt]) -> None:
    waiting: list[Attempt] = []
    pause = FIRST_PAUSE
    while True:
        try:
            attempt = attempts.get(timeout=pause if waiting else None)
        except Empty:  # noqa: PERF203
            waiting = [each for each in waiting if not _is_done(each)]
            pause = min(2 * pause, LONGEST_PAUSE)
        else:
            pause = FIRST_PAUSE
            if attempt not in waiting:
                waiting.append(attempt)


def _is_done(attempt: Attempt) -> bool:
    try:
        return attempt()
    except BaseException:
        # The other attempts must be made.
        logger.exception("A delayed call of django_pglock has failed.")
        return True
