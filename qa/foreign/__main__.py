"""Run each foreign project's tests in a process of its own: ``python -m qa.foreign [NAME...]``.

Settings, patched classes and instrumentation are a process's, so no two packages may meet in one. A project is a file
``test_NAME.py`` with settings ``projects/NAME.py``. All of them run on one private PostgreSQL, each in a database of
its own. Ends with 1 when anything failed, is missing, or was skipped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from example_project.postgres import PrivatePostgres

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
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
    with PrivatePostgres() as server, ThreadPoolExecutor(options.processes) as pool:
        passed = [*pool.map(lambda name: run(name, environment(name, server.url), options.pytest), wanted)]
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
