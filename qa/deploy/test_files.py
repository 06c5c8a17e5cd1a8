"""Each file of ``deploy/`` is read by the tool that it is made for. What is missing here is a failure, never skipped.

No tool that can be installed knows KEDA's objects; ``tests/plans/test_autoscaler.py`` runs their query.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import compose_spec
import kubernetes_validate
import pytest
import yaml

from django_pglock.models import Task
from tests.conftest import NEVER, ROOT, environment_at
from tests.sample import tasks

DEPLOY = ROOT / "deploy"
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def run(program, *arguments):
    """Run a tool and return its output. No output and no error means that it accepts the file."""
    found = shutil.which(program, path=PROGRAMS)
    assert found, f"{program} is missing: see qa/requirements.txt"
    done = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=NEVER, check=False)
    return (done.returncode, done.stdout + done.stderr)


def systemd(file):
    # The unit is not on the host that it is for: only the interpreter differs there.
    unit = file.with_name("checked.service")
    unit.write_text(file.read_text().replace("/srv/shop/.venv/bin/python", sys.executable))
    assert run("systemd-analyze", "verify", "--recursive-errors=no", str(unit)) == (0, "")


def promtool(file):
    code, said = run("promtool", "check", "config", str(file.with_name("prometheus.yml")))
    assert code == 0, said


def grafana(file):
    """The expressions are those of Prometheus; so its own tool reads them, as rules."""
    panels = json.loads(file.read_text())["panels"]
    expressions = [target["expr"].replace("$__rate_interval", "1m") for each in panels for target in each["targets"]]
    assert len(expressions) >= len(panels) > 5
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(expressions)]
    made = file.with_name("panels.yml")
    made.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    code, said = run("promtool", "check", "rules", str(made))
    assert code == 0, said


def hadolint(file):
    assert run("hadolint", str(file)) == (0, "")


def compose(file):
    # The specification has YAML's merge keys resolved first, as Docker Compose does.
    compose_spec.PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(file.read_text())))


def kubernetes(file):
    objects = list(yaml.safe_load_all(file.read_text()))
    builtin = [each for each in objects if not each["apiVersion"].startswith("keda.sh/")]
    for each in builtin:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    scaled, authentication = (each for each in objects if each not in builtin)
    names = {each["kind"]: each["metadata"]["name"] for each in objects}
    assert scaled["spec"]["scaleTargetRef"]["name"] == names["Deployment"]
    assert [each["authenticationRef"]["name"] for each in scaled["spec"]["triggers"]] == [
        names["TriggerAuthentication"]
    ]
    assert authentication["spec"]["secretTargetRef"][0]["parameter"] == "connection"


CHECKS = [
    (systemd, "lockworker.service", "TimeoutStartSec=infinity", "TimeoutStartSec=forever"),
    (promtool, "prometheus.yml", "scrape_interval", "scrape_intervals"),
    (promtool, "alerts.yml", "max by (queue)", "max by queue"),
    (grafana, "grafana-dashboard.json", "max by (queue)", "max by queue"),
    (hadolint, "Dockerfile", "FROM python:3.13-slim", "FROM python"),
    (compose, "compose.yaml", "stop_grace_period", "stop_grace_periods"),
    (kubernetes, "kubernetes.yaml", "livenessProbe", "liveProbe"),
    (kubernetes, "kubernetes.yaml", "authenticationRef: {name: shop-database}", "authenticationRef: {name: shop}"),
]


@pytest.mark.parametrize(("check", "name", "right", "wrong"), CHECKS)
def test_the_tool_of_a_deploy_file_accepts_it_and_refuses_a_mistake(tmp_path, check, name, right, wrong):
    for file in DEPLOY.iterdir():
        shutil.copy(file, tmp_path)
    copy = tmp_path / name
    check(copy)
    text = copy.read_text()
    assert right in text
    copy.write_text(text.replace(right, wrong))
    with pytest.raises((AssertionError, ValueError, kubernetes_validate.ValidationError)):
        check(copy)


def test_every_alert_fires_when_it_should_and_not_before():
    rules = Path(__file__).with_name("alerts_test.yml")
    code, said = run("promtool", "test", "rules", str(rules))
    assert code == 0, said
    alerts = [each["alert"] for each in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]]
    cases = [case for test in yaml.safe_load(rules.read_text())["tests"] for case in test["alert_rule_test"]]
    for fires in (True, False):
        assert {case["alertname"] for case in cases if bool(case["exp_alerts"]) == fires} == set(alerts)


@pytest.mark.acceptance
def test_honcho_runs_the_worker_of_the_procfile(transactional_db, eventually):
    """For real: from the folder of the file's commands, by a shell of its own."""
    result = tasks.nothing.enqueue()
    process = subprocess.Popen(
        [sys.executable, "-m", "honcho", "start", "-f", str(DEPLOY / "Procfile"), "-d", str(ROOT), "worker"],
        env=environment_at(PATH=PROGRAMS, PGLOCK_NO_BOOTSTRAP="1"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        eventually(lambda: Task.objects.get(pk=result.id).status == "SUCCESSFUL" or process.poll() is not None)
        process.send_signal(signal.SIGTERM)
        # It kills its processes after five seconds, which a slow machine may need to end in order.
        output, _ = process.communicate(timeout=NEVER)
    finally:
        process.kill()
        process.wait()
    assert Task.objects.get(pk=result.id).status == "SUCCESSFUL", output
