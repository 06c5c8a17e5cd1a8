"""The report of a soak, from invented samples and rounds."""

from __future__ import annotations

import json

import pytest

from qa.soak.report import write_report

TABLE = [100, 5, 2**20, 2**20]


def sample(at, **more):
    database = {
        "sessions": {"threads and clients": 4, "soak": 1},
        "tables": dict.fromkeys(("task", "attempt", "worker", "schedule", "waiter"), TABLE),
        "finished": 500,
        "latency": [0.01, 0.1, 1.0],
    }
    return {"at": at, "seconds": 10, "processes": {"steady worker": [[70 * 1024, 14]]}, **database, **more}


@pytest.mark.parametrize("findings", [[], ["lost: task 7 was enqueued, and its row is gone"]])
def test_the_report_lists_the_violations(tmp_path, findings):
    away = {"at": 20.0, "seconds": 10, "processes": {}}
    samples = [sample(0.0), sample(10.0), away, sample(30.0, latency=None)]
    rounds = [
        {"fault": "outage", "tasks": 1500, "repaired": 1.5, "findings": []},
        {"fault": "outage", "tasks": 1500, "repaired": 2.5, "findings": findings},
    ]
    for name, lines in (("samples", samples), ("rounds", rounds)):
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text + '{"half a li')
    assert write_report(tmp_path) is not bool(findings)
    report = (tmp_path / "report.md").read_text()
    assert f"| outage | 2 | 2.0 s | 2.5 s | {'BROKEN' if findings else 'kept'} |" in report
    assert all(finding in report for finding in findings)
    assert "| memory of the largest process: steady worker (MiB) | 70 |" in report
