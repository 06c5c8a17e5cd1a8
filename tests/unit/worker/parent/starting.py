"""A parent with a starter, and children that do what they are told. Run as a program: ``starting.py fork|spawn``.

It reads a command from each line of its standard input, and writes what happens.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import time

from django_pglock.worker.channel import Channel, new_loop
from django_pglock.worker.parent.starter import channel_of_spawned, make_starter, run_to_end

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def say(*words: object) -> None:
    # One write, because several processes write here.
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def run_child(end: socket.socket) -> int:
    """Do what the parent says, until it has ended."""
    sys.stdout.write("printed by the child\n")
    channel = Channel(end)
    channel.send(ready=[os.getpid(), os.getppid(), sorted(os.listdir("/dev/fd")), os.get_inheritable(end.fileno())])
    while not channel.is_over:
        for message in channel.receive():
            obey(channel, *message["do"])
        time.sleep(0.005)
    return 7


def obey(channel: Channel, what: str, *value: str) -> None:
    match what:
        case "exit":
            sys.exit(int(value[0]))
        case "raise":
            raise RuntimeError("an error of a child")
        case "hog":
            channel.send(hogs=True)
            time.sleep(0.05)
            ctypes.PyDLL(None).usleep(600_000_000)
        case "close":
            os.closerange(3, 1000)
            time.sleep(600)


class Parent:
    """Starts children, and passes commands on."""

    def __init__(self) -> None:
        self.loop = new_loop()
        self.children: dict[str, Channel] = {}
        command = [sys.executable, __file__, "child"]
        sys.stdout.write("printed by the parent\n")
        self.starter = make_starter(
            self.loop, run_child, lambda: command, self.on_end, lambda: say("lost", self.loop.stop())
        )
        self.loop.add_reader(0, self.read)

    def read(self) -> None:
        for line in os.read(0, 1000).decode().splitlines():
            what, *words = line.split()
            match what:
                case "start":
                    self.start()
                case "kill":
                    self.starter.kill(words[0])
                case "end":
                    self.starter.close()
                    self.loop.stop()
                case _:
                    self.children[words[0]].send(do=[what, *words[1:]])

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        channel, key = Channel(ours), str(len(self.children))
        self.children[key] = channel
        self.loop.add_reader(channel.fileno(), self.receive, key)
        with theirs:
            self.starter.start(key, theirs)
        say("started", key)

    def receive(self, key: str) -> None:
        for message in self.children[key].receive():
            say("heard", key, message)
        if self.children[key].is_over:
            self.loop.remove_reader(self.children[key].fileno())
            say("over", key)

    def on_end(self, key: str, code: int | str) -> None:
        say("ended", key, code)


def main(kind: str) -> None:
    if (channel := channel_of_spawned()) is not None:
        run_to_end(lambda: run_child(channel))
    if kind == "spawn":
        multiprocessing.set_start_method("spawn")
    parent = Parent()
    say("begun", os.getpid(), getattr(parent.starter, "pid", 0))
    parent.loop.run_forever()


if __name__ == "__main__":
    main(sys.argv[1])
