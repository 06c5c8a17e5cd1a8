"""Questions to the probes of a worker."""

from __future__ import annotations

import re
from http.client import HTTPConnection

LABEL = r'[a-z]+="(?:[^"\\\n]|\\.)*"'


SAMPLE = re.compile(rf"(django_pglock_[a-z_]+)(?:\{{({LABEL}(?:,{LABEL})*)\}})? (-?[0-9.e-]+)")


def ask(worker, path, method="GET"):
    client = HTTPConnection("127.0.0.1", worker.server.port, timeout=60)
    try:
        client.request(method, path)
        answer = client.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        client.close()


def metrics(worker):
    """Ask for the metrics and return them by name, or by name and label. Each line has to be one of the format."""
    status, text, headers = ask(worker, "/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    samples, kinds = {}, {}
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert name not in kinds
            assert (kind == "counter") == name.endswith("_total")
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            name, labels, number = SAMPLE.fullmatch(line).groups()
            assert kinds[name if name in kinds else re.sub("_(bucket|sum|count)$", "", name)]
            values = re.sub(r'="((?:[^"\\]|\\.)*)"', r"=\1", labels or "")
            samples[f"{name.removeprefix('django_pglock_')} {values}".rstrip()] = float(number)
    return samples
