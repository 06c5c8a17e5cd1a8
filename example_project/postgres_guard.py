"""The folder of a private PostgreSQL: whose it is, and who removes it when its owner is gone.

The owner is the process that holds the lock (``flock``) of the file ``owner`` in the folder. The kernel lets go of it
when that process ends, in whatever way, so no process numbers are compared, which systems use again and containers
count on their own. Whoever removes the folder takes the lock first:

* the *guard*, a small process started with the server, reads from a pipe whose other end only the owner has. The end
  of that pipe is the end of the owner, also after ``kill -9``;
* the *sweep* at the next start, should the guard have been killed as well.

Only folders that belong to our own user are looked at, and only a server that is at home in the folder is stopped:
anybody may write anything into the temporary directory. The guard runs this file as a script, without the project.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PREFIX = "pglock-pg-"
#: The server's own folder in ours.
SERVER = "server"
_UNLOCKED_PREFIX = ".pglock-pg-"
#: Unix sockets have short names; a temporary directory of a test may be too deep for one.
TEMPORARY = "/tmp" if Path("/tmp").is_dir() else tempfile.gettempdir()


def make_folder() -> tuple[Path, int]:
    """Make a folder that nobody else can enter, and return it with the descriptor of the lock that makes it ours."""
    unlocked = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX, dir=TEMPORARY))
    lock = os.open(unlocked / "owner", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Only now under the name that a sweep looks for: it must never find a folder that is not locked yet.
    folder = unlocked.with_name(unlocked.name.lstrip("."))
    unlocked.rename(folder)
    return folder, lock


def release(lock: int) -> None:
    """Give the ownership up, also for a forked child that has the descriptor too."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def start_guard(folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that cleans the folder up when our end of the pipe is closed, for whatever reason."""
    return subprocess.Popen(
        [sys.executable, "-S", "-E", str(Path(__file__).resolve()), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True,
    )  # fmt: skip


def dismiss(guard: subprocess.Popen[bytes]) -> None:
    """End a guard that has nothing left to do."""
    assert guard.stdin is not None
    # A byte, for the pipe does not end as long as a forked child of ours has it. The guard may be dead.
    with contextlib.suppress(OSError):
        guard.stdin.write(b".")
        guard.stdin.flush()
    with contextlib.suppress(OSError):
        guard.stdin.close()
    guard.wait(60)


def guard(folder: Path) -> None:
    """Wait until the owner has gone, then clean up."""
    sys.stdin.buffer.read(1)
    # The pipe and the lock end together, but in an order that nobody knows.
    for _ in range(100):
        if not folder.exists() or clean(folder):
            return
        time.sleep(0.05)


def sweep() -> None:
    """Remove what owners left behind that were killed together with their guards. Never touches a living one's."""
    for folder in sorted(Path(TEMPORARY).glob(f"{PREFIX}*")):
        if _is_ours(folder):
            clean(folder)


def clean(folder: Path) -> bool:
    """Stop the server of a folder, if it runs, and remove the folder; return False when its owner lives."""
    lock = _take_lock(folder)
    if lock is None:
        return False
    try:
        stop_server(folder / SERVER / "data")
        remove(folder)
    finally:
        os.close(lock)
    return True


def remove(folder: Path) -> None:
    """Remove a folder, patiently: what was just starting in it may write another file."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def stop_server(data: Path) -> None:
    """Stop the server of a data folder: politely for three seconds, then at once."""
    for number, patience in ((signal.SIGINT, 3.0), (signal.SIGQUIT, 2.0), (signal.SIGKILL, 2.0)):
        pid = server_of(data)
        if pid is None:
            return
        os.kill(pid, number)
        deadline = time.monotonic() + patience
        while _is_at_home(pid, data) and time.monotonic() < deadline:
            time.sleep(0.01)


def server_of(data: Path) -> int | None:
    """Return the process number of the server that runs on a data folder, or None."""
    try:
        pid = int((data / "postmaster.pid").read_text().partition("\n")[0])
    except (OSError, ValueError):
        return None
    # A stale file may hold the number of a stranger by now, and signals of root reach everybody.
    return pid if pid > 1 and _is_at_home(pid, data) else None


def _is_at_home(pid: int, data: Path) -> bool:
    # PostgreSQL works inside its data folder. A process that has ended and waits for its parent is nowhere at home.
    if sys.platform == "linux":
        try:
            return Path(f"/proc/{pid}/cwd").samefile(data)
        except OSError:
            return False
    told = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return f"-D {data}" in told.stdout


def _is_ours(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return folder.is_dir() and not folder.is_symlink() and status.st_uid == os.geteuid()


def _take_lock(folder: Path) -> int | None:
    try:
        lock = os.open(folder / "owner", os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


if __name__ == "__main__":
    guard(Path(sys.argv[1]))
