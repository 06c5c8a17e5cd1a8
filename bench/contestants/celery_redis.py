"""Celery with Redis: its default worker, no results, and a Redis that writes nothing to disk.

Redis is the one in PATH, or Debian's, unpacked into the cache without being installed. Celery has no call for many
tasks, and takes a task from Redis for good before it runs it, so the last few may count as finished that are running.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.contestants.base import Contestant, Failed, main, nothing, repeat, run, sleep, stamp

APT = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "--download-only"]


class CeleryRedis(Contestant):
    name = "Celery with Redis"
    packages = ("celery[redis]", "redis")
    slowness = 10
    _server: subprocess.Popen[bytes] | None = None

    @cached_property
    def folder(self) -> Path:
        """Where the server's socket is: a path of it may not be long."""
        return Path(tempfile.mkdtemp(prefix="bench-redis-"))

    @property
    def environment(self) -> dict[str, str]:
        return {"BENCH_REDIS": f"{self.folder}/redis.sock"}

    def install(self) -> None:
        super().install()
        program, libraries = self._redis()
        self._server = subprocess.Popen(
            [program, "--port", "0", "--unixsocket", f"{self.folder}/redis.sock", "--save", ""],
            stdout=subprocess.DEVNULL,
            cwd=self.folder,
            env={"LD_LIBRARY_PATH": libraries},
        )
        for _ in range(100):
            if (self.folder / "redis.sock").exists():
                return
            time.sleep(0.05)
        raise Failed("redis-server did not start")

    def version(self) -> str:
        program, libraries = self._redis()
        redis = (
            run([program, "--version"], env={"LD_LIBRARY_PATH": libraries}).split()[2].replace("v=", "redis-server ")
        )
        return f"{super().version()}, {redis}"

    def refresh(self) -> None:
        self._ask("FLUSHALL")

    def left(self, database: Any, function: str) -> int:
        return self._ask("LLEN celery") + self._ask("HLEN unacked")

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait()
            shutil.rmtree(self.folder)

    def _ask(self, command: str) -> int:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"{self.folder}/redis.sock")
            connection.sendall(f"{command}\r\n".encode())
            answer = connection.recv(100)
        return int(answer[1:]) if answer.startswith(b":") else 0

    def _redis(self) -> tuple[str, str]:
        """Return the server's program and the folder of its libraries."""
        if program := shutil.which("redis-server"):
            return program, ""
        if shutil.which("apt-get") is None:
            raise Failed("there is no redis-server in PATH, and no apt-get to get one")
        packages, root = self.home / "debian", self.home / "debian" / "root"
        if not root.exists():
            (packages / "partial").mkdir(parents=True, exist_ok=True)
            run([*APT, "-o", f"Dir::Cache::archives={packages}", "-o", "Debug::NoLocking=1", "redis-server"])
            for package in packages.glob("*.deb"):
                run(["dpkg", "-x", str(package), str(root)])
        folders = {str(library.parent) for library in root.rglob("*.so*")}
        return str(root / "usr" / "bin" / "redis-server"), ":".join(folders)


class Producer:
    """The app and its functions."""

    def __init__(self) -> None:
        import os

        import celery

        self.app = celery.Celery("bench", broker=f"redis+socket://{os.environ['BENCH_REDIS']}")
        self.app.conf.task_ignore_result = True
        self.tasks = {each.__name__: self.app.task(name=each.__name__)(each) for each in (nothing, sleep, stamp)}

    def one(self, function: str, *arguments: Any) -> None:
        self.tasks[function].delay(*arguments)

    def many(self, count: int, function: str, *arguments: Any) -> None:
        repeat(count, lambda: self.one(function, *arguments))

    def worker(self, *at_once: str) -> None:
        options = ["--concurrency", *at_once] if at_once else []
        self.app.worker_main(["worker", "--loglevel", "WARNING", *options])


if __name__ == "__main__":
    producer = Producer()
    main(setup=lambda: None, one=producer.one, many=producer.many, worker=producer.worker)
