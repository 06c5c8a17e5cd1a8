"""A primary and a synchronous standby that change places, as Patroni has them do."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from example_project.postgres import PrivatePostgres
from tests.conftest import ask, wait_until

#: Nothing here outlives the machine, so fsync proves nothing; COMMIT has to wait for the standby, though.
SETTINGS = {"synchronous_commit": "on"}
IS_SYNCHRONOUS = "SELECT 1 FROM pg_stat_replication WHERE state = 'streaming' AND sync_state = 'sync'"


class Pair:
    """Two servers. Their folders stay the same, so a connection string with both hosts stays right."""

    def __init__(self) -> None:
        self.primary = PrivatePostgres(settings=SETTINGS)
        self.standby = PrivatePostgres(settings=SETTINGS, standby_of=self.primary)

    def __enter__(self) -> Pair:
        self.primary.start()
        self.standby.start()
        self.hosts = f"{self.primary.folder},{self.standby.folder}"
        return self

    def __exit__(self, *error: object) -> None:
        self.standby.stop()
        self.primary.stop()

    def replicate_synchronously(self) -> None:
        """Have each COMMIT wait until the standby has it, and wait until that is so."""
        ask(self.primary, "ALTER SYSTEM SET synchronous_standby_names = '*'")
        ask(self.primary, "SELECT pg_reload_conf()")
        wait_until(lambda: ask(self.primary, IS_SYNCHRONOUS), "the standby is not synchronous")

    def switch(self, *, power_off: bool) -> None:
        """End the primary, in order or as by a loss of power, and promote the standby."""
        if power_off:
            self.cut_power()
        else:
            self.primary.halt()
        self.primary, self.standby = self.standby, self.primary
        # The new primary has no standby yet, so its commits wait for none.
        ask(self.primary, "ALTER SYSTEM RESET synchronous_standby_names")
        self.primary.promote()

    def rejoin(self) -> None:
        """Make the old primary a standby of the new one, synchronous again."""
        self.standby.follow(self.primary)
        self.replicate_synchronously()

    def cut_power(self) -> None:
        """Kill every process of the primary with SIGKILL."""
        process = self.primary._server
        self.primary._server = None
        assert process is not None
        process.send_signal(signal.SIGSTOP)  # it starts no other process
        segment = (self.primary._data / "postmaster.pid").read_text().split()[6]
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        process.kill()
        process.wait()
        # No other process would remove the small shared memory segment by which PostgreSQL notices a second start.
        subprocess.run(["ipcrm", "-m", segment], check=False, capture_output=True)
