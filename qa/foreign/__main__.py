"""Run each foreign project's tests in a process of its own: ``python -m qa.foreign [NAME...]``.

Settings, patched classes and instrumentation are a process's, so no two packages may meet in one. A project is a file
``test_NAME.py`` with settings ``projects/NAME.py``. All of them run on one private PostgreSQL, each in a database of
its own, but for PostGIS, whose extension comes with Debian's server. Ends with 1 when anything failed, is missing, or
was skipped.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from example_project.postgres import PrivatePostgres

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
#: Projects on Django 5.2, from a folder of packages in front of the others.
ON_DJANGO_52 = {"psqlextra", "wagtail_7"}
#: Projects whose server needs an extension that the private server's programs do not have.
EXTENSIONS = {"postgis": "postgis"}
#: The project that takes longest goes first, so that the run does not wait for it alone at the end.
FIRST = "sessions"
#: Longest that one project may take, in seconds: a hang has to end before the whole run is ended.
LONGEST = 1200
RESULTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed)")


def main() -> int:
    options = read_arguments()
    unknown = set(options.names) - {*projects()}
    if unknown:
        print(f"There is no project {', '.join(sorted(unknown))}; there are {', '.join(projects())}.")
        return 2
    wanted = [name for name in projects() if not options.names or name in options.names]
    with ExitStack() as servers:
        urls = start_servers(servers, wanted)
        environments = {name: environment(name, urls[name], options.django52) for name in wanted}
        with ThreadPoolExecutor(options.processes) as pool:
            counts = [*pool.map(lambda name: run(name, environments[name], options.pytest), wanted)]
    return report(dict(zip(wanted, counts, strict=True)))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m qa.foreign", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="run these projects; default all")
    parser.add_argument("-n", "--processes", type=int, default=2, help="projects at once (default: %(default)s)")
    parser.add_argument(
        "--django52",
        type=Path,
        default=Path(sys.prefix) / "django52",
        help="folder into which requirements-django52.txt is installed (default: %(default)s)",
    )
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


def environment(name: str, url: str, django52: Path) -> Mapping[str, str]:
    path = [str(ROOT)]
    if name in ON_DJANGO_52:
        if not (django52 / "django").is_dir():
            sys.exit(f"Django 5.2 is not in {django52}; qa/foreign/README.md says how it gets there.")
        path.insert(0, str(django52))
    return {
        **os.environ,
        "DATABASE_URL": url,
        "DJANGO_SETTINGS_MODULE": f"qa.foreign.projects.{name}",
        "PYTHONPATH": os.pathsep.join(path),
    }


def run(name: str, environment: Mapping[str, str], more: str) -> Counter[str]:
    """Run one project's tests, print what pytest said, and return how many passed, failed and so on."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(HERE / "pytest.ini"), "--rootdir", str(ROOT)]
    command += ["--confcutdir", str(HERE), *more.split(), str(HERE / f"test_{name}.py")]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False
        )
        results, output, code = done.stdout, done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, code = f"{(late.stdout or b'').decode(errors='replace')}\n{name} took longer than {LONGEST} s.", 1
        results = output
    print(f"\n--- {name}\n{output}", flush=True)
    return count(results, code)


def count(results: str, code: int) -> Counter[str]:
    # Threads of pools may write behind the summary, which is the last line with numbers.
    last = ([""] + [line for line in results.splitlines() if RESULTS.search(line)])[-1]
    counts = Counter({word.rstrip("s"): int(number) for number, word in RESULTS.findall(last)})
    if (code or not counts["passed"]) and not counts["failed"] and not counts["error"]:
        # Its tests did not run: a package is missing, or the migrations failed.
        counts["error"] += 1
    return counts


def report(counts: Mapping[str, Counter[str]]) -> int:
    """Print a line for each project, and the totals as pytest writes them; return the exit code."""
    print("\n--- all")
    for name, counted in counts.items():
        print(f"{name:12} {', '.join(f'{number} {word}' for word, number in sorted(counted.items()))}")
    total = sum(counts.values(), Counter())
    failed = total["failed"] + total["error"]
    skipped = total["skipped"] + total["xfailed"] + total["xpassed"]
    print(f"\n{total['passed']} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 0 if total["passed"] and not failed and not skipped else 1


if __name__ == "__main__":
    sys.exit(main())
