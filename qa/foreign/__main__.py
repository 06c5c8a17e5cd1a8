"""Run each foreign project's tests in a process of its own: ``python -m qa.foreign [NAME...]``.

Settings, patched classes and instrumentation are a process's, so no two packages may meet in one. A project is a file
``test_NAME.py`` with settings ``projects/NAME.py``. All of them run on one private PostgreSQL, each in a database of
its own, but for PostGIS, whose extension comes with Debian's server. Ends with 1 when anything failed, is missing, or
was skipped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from example_project.postgres import PrivatePostgres

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
#: Projects whose server needs an extension that the private server's programs do not have.
EXTENSIONS = {"postgis": "postgis"}
#: The project that takes longest goes first, so that the run does not wait for it alone at the end.
FIRST = "sessions"
#: Longest that one project may take, in seconds: a hang has to end before the whole run is ended.
LONGEST = 1200


def main() -> int:
    options = read_arguments()
    unknown = set(options.names) - {*projects()}
    if unknown:
        print(f"There is no project {', '.join(sorted(unknown))}; there are {', '.join(projects())}.")
        return 2
    wanted = [name for name in projects() if not options.names or name in options.names]
    with ExitStack() as servers:
        urls = start_servers(servers, wanted)
        environments = {name: environment(name, urls[name]) for name in wanted}
        with ThreadPoolExecutor(options.processes) as pool:
            passed = [*pool.map(lambda name: run(name, environments[name], options.pytest), wanted)]
    failed = [name for name, has_passed in zip(wanted, passed, strict=True) if not has_passed]
    print(f"\n{len(wanted) - len(failed)} projects passed, {len(failed)} failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m qa.foreign", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="run these projects; default all")
    parser.add_argument("-n", "--processes", type=int, default=2, help="projects at once (default: %(default)s)")
    parser.add_argument("--pytest", default="", metavar="OPTIONS", help="more options for pytest, in one text")
    return parser.parse_args()


def projects() -> list[str]:
    names = (path.stem.removeprefix("test_") for path in HERE.glob("test_*.py"))
    return sorted(names, key=lambda name: (name != FIRST, name))


def start_servers(servers: ExitStack, wanted: list[str]) -> dict[str, str]:
    """Start the servers that the wanted projects need and return each project's DATABASE_URL."""
    urls = {}
    common = ""
    for name in wanted:
        if name in EXTENSIONS:
            urls[name] = servers.enter_context(PrivatePostgres(programs=programs_with(EXTENSIONS[name]))).url
        else:
            common = common or servers.enter_context(PrivatePostgres()).url
            urls[name] = common
    return urls


def programs_with(extension: str) -> Path:
    """Return the programs of a PostgreSQL of Debian's that has an extension."""
    for control in sorted(Path("/usr/share/postgresql").glob(f"*/extension/{extension}.control"), reverse=True):
        version = control.parent.parent.name
        return Path("/usr/lib/postgresql") / version / "bin"
    sys.exit(f"No PostgreSQL here has the extension {extension}: apt-get install postgresql-15-postgis-3")


def environment(name: str, url: str) -> Mapping[str, str]:
    return {
        **os.environ,
        "DATABASE_URL": url,
        "DJANGO_SETTINGS_MODULE": f"qa.foreign.projects.{name}",
        "PYTHONPATH": str(ROOT),
    }


def run(name: str, environment: Mapping[str, str], more: str) -> bool:
    """Run one project's tests, print what pytest said, and return whether all of them passed, with none skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(HERE / "pytest.ini"), "--rootdir", str(ROOT)]
    command += ["--confcutdir", str(HERE), *more.split(), str(HERE / f"test_{name}.py")]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False
        )
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, code = f"{(late.stdout or b'').decode(errors='replace')}\n{name} took longer than {LONGEST} s.", 1
    print(f"\n--- {name}\n{output}", flush=True)
    return code == 0 and " skipped" not in output


if __name__ == "__main__":
    sys.exit(main())
