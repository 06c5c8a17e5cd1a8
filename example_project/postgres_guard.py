"""The folder of a private PostgreSQL: which process owns it, and what removes it when that process has ended.

The owner is the process that holds the lock (``flock``) of the file ``owner`` in the folder. The kernel releases the
lock when the process ends for any reason. So no process ids are compared, which a system uses again and each container
counts by itself. Two parts remove the folder, and both take the lock first:

* the *guard*, a small process that is started with the server, reads from a pipe whose other end only the owner has.
  The pipe is closed when the owner ends, also after ``kill -9``;
* the *sweep* at the next start, if the guard was killed as well.

Only folders of this user are examined, and only a server whose working directory is in the folder is stopped, because
every user can write to the temporary directory. The guard runs this file as a script, without the project.
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
#: The name of the server's folder inside of the private folder.
SERVER = "server"
_UNLOCKED_PREFIX = ".pglock-pg-"
#: The path of a Unix socket is limited to about 100 characters; a temporary directory of a test may be too deep.
TEMPORARY = "/tmp" if Path("/tmp").is_dir() else tempfile.gettempdir()
#: Linux: the temporary directory in memory. The file systems of disks take much longer to make the thousand files of a
#: server, and longer still if a thousand others were deleted a moment ago.
MEMORY = "/dev/shm"
#: Bytes that must be free there, for several servers at once. Containers often have 64 MB.
FREE_MEMORY = 4 << 30


def make_folder(*, in_memory: bool = False) -> tuple[Path, int]:
    """Make a folder that only this user can enter. Return it with the descriptor of the lock that marks the owner."""
    parent = MEMORY if in_memory and has_free_memory() else TEMPORARY
    unlocked = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX, dir=parent))
    lock = os.open(unlocked / "owner", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # The folder gets the name that sweep() searches for only now, so that sweep() never finds an unlocked new folder.
    folder = unlocked.with_name(unlocked.name.lstrip("."))
    unlocked.rename(folder)
    return folder, lock


def has_free_memory() -> bool:
    """Return whether servers, and copies of their programs, may be in memory."""
    try:
        status = os.statvfs(MEMORY)
    except OSError:
        return False
    is_large = status.f_bavail * status.f_frsize >= FREE_MEMORY
    return is_large and not status.f_flag & os.ST_NOEXEC and os.access(MEMORY, os.W_OK)


def release(lock: int) -> None:
    """Release the lock of the owner, also for a forked child that has the same descriptor."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def start_guard(folder: Path) -> subprocess.Popen[bytes]:
    """Start the guard: a process that removes the folder when this process's end of the pipe is closed."""
    return subprocess.Popen(
        [sys.executable, "-S", "-E", str(Path(__file__).resolve()), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True,
    )  # fmt: skip


def dismiss(guard: subprocess.Popen[bytes]) -> None:
    """End a guard whose folder has been removed."""
    assert guard.stdin is not None
    # A byte, because the pipe stays open as long as a forked child has its end. The guard may be dead.
    with contextlib.suppress(OSError):
        guard.stdin.write(b".")
        guard.stdin.flush()
    with contextlib.suppress(OSError):
        guard.stdin.close()
    guard.wait(60)


def guard(folder: Path) -> None:
    """Wait until the owner has ended, then remove the folder."""
    sys.stdin.buffer.read(1)
    # The kernel closes the pipe and releases the lock at the end of the owner, in any order.
    for _ in range(100):
        if not folder.exists() or clean(folder):
            return
        time.sleep(0.05)


def sweep() -> None:
    """Remove the folders of owners that were killed together with their guards. Folders of living owners stay."""
    for parent in (TEMPORARY, MEMORY):
        for folder in sorted(Path(parent).glob(f"{PREFIX}*")):
            if _is_ours(folder):
                clean(folder)


def clean(folder: Path) -> bool:
    """Stop the server of a folder, if it runs, and remove the folder. Return False if the owner lives."""
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
    """Remove a folder, in several attempts: a server that was starting may still write a file."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def stop_server(data: Path) -> None:
    """Stop the server of a data folder: by SIGINT, after three seconds by SIGQUIT, after two more by SIGKILL."""
    for number, timeout in ((signal.SIGINT, 3.0), (signal.SIGQUIT, 2.0), (signal.SIGKILL, 2.0)):
        pid = server_of(data)
        if pid is None:
            return
        os.kill(pid, number)
        deadline = time.monotonic() + timeout
        while _is_at_home(pid, data) and time.monotonic() < deadline:
            time.sleep(0.01)


def server_of(data: Path) -> int | None:
    """Return the process number of the server that runs on a data folder, or None."""
    try:
        pid = int((data / "postmaster.pid").read_text().partition("\n")[0])
    except (OSError, ValueError):
        return None
    # A stale file may contain the id of another process by now, and root may signal every process.
    return pid if pid > 1 and _is_at_home(pid, data) else None


def _is_at_home(pid: int, data: Path) -> bool:
    # PostgreSQL's working directory is its data folder. A zombie process has no working directory.
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
