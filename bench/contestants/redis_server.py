"""The Redis of the contestants that need one. It writes nothing to disk.

It is the server in PATH, or Debian's, unpacked into the cache without being installed.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from functools import cached_property
from pathlib import Path

from bench.contestants.base import Contestant, Failed, run

APT = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "--download-only"]


class RedisContestant(Contestant):
    """A contestant with a Redis of its own, whose socket is in ``BENCH_REDIS``."""

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
        self.ask("FLUSHALL")

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait()
            shutil.rmtree(self.folder)

    def ask(self, command: str) -> int:
        """Return the number that the server answers to a command."""
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
        packages = self.home.parent / "debian"
        root = packages / "root"
        if not root.exists():
            (packages / "partial").mkdir(parents=True, exist_ok=True)
            run([*APT, "-o", f"Dir::Cache::archives={packages}", "-o", "Debug::NoLocking=1", "redis-server"])
            for package in packages.glob("*.deb"):
                run(["dpkg", "-x", str(package), str(root)])
        folders = {str(library.parent) for library in root.rglob("*.so*")}
        return str(root / "usr" / "bin" / "redis-server"), ":".join(folders)
