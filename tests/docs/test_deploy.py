"""The files of ``deploy/``: each option, metric and address that they name exists, and the docs show and explain them.

``qa/deploy`` gives each file to the tool that it is made for.
"""

from __future__ import annotations

import re
from contextlib import closing
from http.client import HTTPConnection

import pytest

from django_pglock.management.commands.runlockworker import Command
from django_pglock.store.numbers import OUTCOMES
from tests.conftest import ROOT

FILES = {path.name: path.read_text() for path in sorted((ROOT / "deploy").iterdir())}
MONITORING = (ROOT / "docs" / "admin.md").read_text()
SHOWN = MONITORING + (ROOT / "docs" / "worker.md").read_text()
#: Tables have such names, too.
METRIC = re.compile(r"django_pglock_(?!(?:task|worker|number)\b)\w+")
#: Where a platform says how long a process may take to stop, in seconds.
PATIENCE = {
    "lockworker.service": r"TimeoutStopSec=(\d+)",
    "compose.yaml": r"stop_grace_period: (\d+)s",
    "kubernetes.yaml": r"terminationGracePeriodSeconds: (\d+)",
}
HEROKU = 30


def commands(text):
    """Return the arguments of each ``runlockworker``, from a command line, a YAML list or a Dockerfile."""
    return [re.findall(r"[\w./*=-]+", line) for line in re.findall(r"runlockworker\b(.*)", text)]


def options(file):
    parser = Command().create_parser("manage.py", "runlockworker")
    return [parser.parse_args(arguments) for arguments in commands(FILES[file])]


@pytest.fixture(scope="module")
def starting():
    return {name: options(name) for name in FILES if commands(FILES[name])}


def test_the_worker_has_every_option_that_a_file_gives_it(starting):
    assert set(starting) == {*PATIENCE, "Dockerfile", "Procfile"}


def test_a_platform_waits_longer_than_the_grace(starting):
    for name, text in PATIENCE.items():
        [timeout] = re.findall(text, FILES[name])
        assert [each.grace < int(timeout) for each in starting[name]] == [True], name
    assert [each.grace < HEROKU for each in starting["Procfile"]] == [True]
    # A parent kills a child that outlives its grace by half a minute.
    [unit] = starting["lockworker.service"]
    assert unit.grace + 30 < int(re.findall(PATIENCE["lockworker.service"], FILES["lockworker.service"])[0])


def test_deploy_files_use_the_probe_ports_of_the_worker(starting):
    ports = {int(each.probe_port) for name in starting if name != "Procfile" for each in starting[name]}
    assert len(ports) == 1
    first = ports.pop()
    for name in ("compose.yaml", "kubernetes.yaml"):
        named = re.findall(r"127\.0\.0\.1:(\d+)|containerPort: (\d+)|prometheus.io/port: \"(\d+)", FILES[name])
        assert {int("".join(port)) for port in named} == {first}, name
    scraped = {int(port) for port in re.findall(r"example\.com:(\d+)", FILES["prometheus.yml"])}
    assert scraped == {first}


@pytest.mark.django_db(transaction=True)
def test_a_worker_has_every_metric_and_path_that_is_named(worker, eventually):
    running = worker(probe_port="127.0.0.1:0")

    def ask(path):
        with closing(HTTPConnection("127.0.0.1", running.server.port, timeout=60)) as client:
            client.request("GET", path)
            answer = client.getresponse()
            return answer.status, answer.read().decode()

    # Before the first heartbeat there is no age of it.
    text = eventually(lambda: "heartbeat_age_seconds" in (text := ask("/metrics")[1]) and text)
    printed = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    named = {name for file in FILES.values() for name in METRIC.findall(file)} | set(METRIC.findall(MONITORING))
    assert named <= printed
    outcomes = {each for file in FILES.values() for each in re.findall(r'outcome=~?\\?"([\w|]+)', file)}
    assert outcomes
    assert {each for several in outcomes for each in several.split("|")} <= set(OUTCOMES)
    for path in {path for file in FILES.values() for path in re.findall(r"/(?:livez|readyz)", file)}:
        assert ask(path)[0] in (200, 503)


def test_every_deploy_file_is_named_in_a_page():
    shown = set(re.findall(r"literalinclude\} \.\./deploy/(.+)", SHOWN))
    assert shown | {"grafana-dashboard.json"} == set(FILES)
    assert "`deploy/grafana-dashboard.json`" in SHOWN


def test_every_alert_has_a_section_that_says_what_to_do():
    alerts = re.findall(r"- alert: (\w+)", FILES["alerts.yml"])
    assert len(alerts) >= 8
    runbook = MONITORING.partition("## Runbook")[2].partition("\n## ")[0]
    assert re.findall(r"^### (\w+)$", runbook, re.MULTILINE) == alerts


def test_no_page_contains_a_systemd_unit():
    """A second one would differ from the first one day."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    assert not [page for page in pages if "ExecStart=" in page.read_text()]
