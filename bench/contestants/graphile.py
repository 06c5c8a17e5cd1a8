"""graphile-worker in its batched mode, with the settings of its own performance page; the program is graphile.cjs.

https://worker.graphile.org/docs/performance
"""

from __future__ import annotations

import json

from bench.contestants.base import COROUTINE, LOCKED, Contestant, run


class Graphile(Contestant):
    name = "graphile-worker, batched"
    # All of its functions are coroutines.
    naps = {**Contestant.naps, COROUTINE: "sleep", LOCKED: "sleep"}
    # A finished job is deleted. A task's name is beside the job.
    unfinished = "SELECT FROM graphile_worker._private_jobs WHERE %s <> ''"

    @property
    def command(self) -> list[str]:
        return ["node", __file__.replace(".py", ".cjs")]

    @property
    def environment(self) -> dict[str, str]:
        return {"NODE_PATH": str(self.home / "node_modules"), "NODE_ENV": "production", "NO_LOG_SUCCESS": "1"}

    def install(self) -> None:
        if not (self.home / "node_modules" / "graphile-worker").exists():
            self.home.mkdir(parents=True, exist_ok=True)
            run(["npm", "install", "--no-fund", "--no-audit", "--prefix", str(self.home), "graphile-worker"])

    def version(self) -> str:
        package = json.loads((self.home / "node_modules" / "graphile-worker" / "package.json").read_text())
        return f"graphile-worker {package['version']} on node {run(['node', '--version'])}"
