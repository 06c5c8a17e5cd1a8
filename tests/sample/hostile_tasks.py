"""Task functions that do to their process what users' code can do to it. Each of them succeeds or dies."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import locale
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor

from django_pglock import task
from tests.sample.forking_tasks import fork
from tests.sample.models import Effect


def close_all_files():
    os.closerange(0, 4096)


def close_all_files_but_output():
    os.closerange(3, 4096)


def redirect_all_files():
    """The numbers of sockets and pipes are those of another file from now on."""
    with open(os.devnull, "r+b") as other:
        for number in open_files():
            os.dup2(other.fileno(), number)


def write_into_all_files():
    """Servers, the parent and the loop of this process get bytes that they cannot read."""
    for number in open_files():
        with contextlib.suppress(OSError):
            os.write(number, b"\xffnobody knows what this is\n")


def open_files():
    return [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]


def close_output():
    sys.stdout.close()
    sys.stderr.close()


def exit_at_once():
    os._exit(0)


def exit_interpreter():
    sys.exit(3)


def become_another_program():
    os.execvp("sleep", ["sleep", "600"])


def crash():
    ctypes.string_at(0)


def abort():
    os.abort()


def replace_signal_handlers():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        ctypes.CDLL(None).signal(number, 1)  # SIG_IGN; Python refuses this outside of the main thread


def set_alarm():
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.2)


def send_signals_to_itself():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
    time.sleep(0.2)


def recurse():
    recurse()


def recurse_in_c():
    sys.setrecursionlimit(10**9)
    nested = []
    for _ in range(10**6):
        nested = [nested]
    repr(nested)


def exhaust_memory():
    """Meet the limit of the process, as of a container, and keep what was taken until the end of the call."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**26, resource.RLIM_INFINITY))
    try:
        kept = []
        while True:
            kept.append(bytearray(2**20))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def exhaust_files():
    kept = []
    while True:
        kept.append(os.open("/dev/null", os.O_RDONLY))


def leak_files():
    """No session can be opened in this process any more."""
    while True:
        kept_files.append(os.open(os.devnull, os.O_RDONLY))


kept_files: list[int] = []


def leave_threads():
    for daemon in (True, False):
        threading.Thread(target=time.sleep, args=(600,), daemon=daemon).start()


def leave_a_fork():
    if not fork():
        # The reader of the output of the worker waits for the end of all processes that may write to it.
        for number in (1, 2):
            os.dup2(os.open("/dev/null", os.O_WRONLY), number)
        time.sleep(60)
        os._exit(0)


def return_in_fork():
    """The new process leaves the function, as if it were the worker."""
    fork()


def leave_pool():
    kept_pools.append(ProcessPoolExecutor(1))
    kept_pools[-1].submit(time.time).result()


kept_pools: list[ProcessPoolExecutor] = []


def close_loops():
    """Close the descriptors by which the event loops of the process wait."""
    import asyncio

    for each in gc.get_objects():
        if isinstance(each, asyncio.SelectorEventLoop):
            os.close(each._selector.fileno())


def change_surroundings():
    os.chdir("/")
    os.umask(0o777)
    locale.setlocale(locale.LC_ALL, "C")
    os.environ.clear()
    time.tzset()


def break_logging():
    class Broken(logging.Handler):
        def handle(self, record):
            raise RuntimeError("a handler of the project")

    logging.getLogger("django_pglock").addHandler(Broken())


def close_log():
    logging.shutdown()


def stop_event_loop_of_others():
    import asyncio

    asyncio.run(asyncio.sleep(0))
    asyncio.set_event_loop(None)


def switch_tracing_on():
    sys.settrace(lambda *_: 1 / 0)
    threading.settrace(lambda *_: 1 / 0)


def do_not_switch_threads():
    sys.setswitchinterval(1000)


WAYS = {each.__name__: each for each in (
    close_all_files, close_all_files_but_output, redirect_all_files, write_into_all_files, close_output, exit_at_once,
    exit_interpreter, become_another_program, crash, abort, replace_signal_handlers, set_alarm, send_signals_to_itself,
    recurse, recurse_in_c, exhaust_memory, exhaust_files, leak_files, leave_threads, leave_a_fork, return_in_fork,
    leave_pool, close_loops,
    change_surroundings, break_logging, close_log, stop_event_loop_of_others, switch_tracing_on, do_not_switch_threads,
)}  # fmt: skip


@task
def do(way):
    Effect.objects.create(name=way, pid=os.getpid())
    WAYS[way]()


@task
async def do_in_coroutine(way):
    await Effect.objects.acreate(name=way, pid=os.getpid())
    WAYS[way]()


@task
def do_at_exit():
    atexit.register(lambda: print(f"The task ends in {os.getpid()}.", flush=True))
    return os.getpid()


@task
def leave_orphans(seconds):
    """Leave processes whose parent ends: the first process of a container becomes their parent."""
    subprocess.run(["sh", "-c", f"sleep {seconds} & sleep {seconds} &"], check=True)
