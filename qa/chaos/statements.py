"""A proxy that counts the statements of workers, and holds a certain one, so that a test can strike its worker there.

The statements are those of task threads, settlers and feeders: of them consist the claim of a task, its run, its
outcome and its children. Polls that find nothing are not counted, because their number depends on the time.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.proxy import Proxy

#: The sessions of parents, which run no tasks.
OF_PARENTS = (b"lockworker heartbeat", b"lockworker upkeep")
OF_FEEDER = b"lockworker feeder"
_SESSION = re.compile(rb"application_name\0([^\0]*)")
_VALUE = re.compile(r"'(?:[^']|'')*'|\b[\d.]+\b|\bNULL\b")
_PREPARED = re.compile(r"(PREPARE|EXECUTE) (\w+)( AS)?")
#: The kinds of messages: those by which a client executes something, and that of a row.
QUERY, PARSE, ROW = b"Q", b"P", b"D"


@dataclass(frozen=True)
class Place:
    """A statement of a run: its text without values, and its number among those with the same text."""

    text: str
    number: int


@dataclass
class Held:
    """A statement that does not reach the server, or an answer that does not reach the worker, until it is released."""

    place: Place
    is_answer: bool
    proxy: StatementProxy | None = None
    link: Any = None
    data: bytes = b""
    is_passed_on: bool = False
    is_reached: threading.Event = field(default_factory=threading.Event)
    is_released: threading.Event = field(default_factory=threading.Event)
    is_answered: threading.Event = field(default_factory=threading.Event)

    def release(self, *, is_passed_on: bool) -> None:
        """Continue, with this message or without it."""
        self.is_passed_on = is_passed_on
        self.is_released.set()

    def send_late(self) -> None:
        """Let the server execute it, although its client has ended."""
        self.link.server.sendall(self.data)
        self.is_answered.wait(60)


class Counted:
    """The statements of all workers since ``begin()``, and which of them is held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seen: Counter[str] = Counter()
        self.held: Held | None = None
        #: The texts of claims. A claim that has not reached the server is like none.
        self.claims: set[str] = set()

    def begin(self, held: Held | None = None) -> None:
        """Count anew."""
        with self._lock:
            self.seen, self.held = Counter(), held

    def place_of(self, text: str) -> Place:
        """Count a statement."""
        with self._lock:
            self.seen[text] += 1
            return Place(text, self.seen[text])


class StatementProxy(Proxy):
    """The way of one worker to the server, or to a pooler."""

    def __init__(self, host: str, counted: Counted) -> None:
        super().__init__(host)
        self.counted = counted
        self._sessions: dict[Any, bytes] = {}
        self._prepared: dict[tuple[Any, str], str] = {}
        #: The last statement of each link; only its text if it is counted by its answer.
        self._asked: dict[Any, Place | str] = {}

    def passes(self, link: Any, data: bytes, *, is_answer: bool) -> bool:
        """Count the statement of a chunk. A client waits for each answer, so a chunk begins with a message."""
        place = self._answer(link, data) if is_answer else self._question(link, data)
        held = self.counted.held
        if held is None:
            return True
        if is_answer and link is held.link:
            held.is_answered.set()
        if (held.place, held.is_answer) != (place, is_answer) or held.is_reached.is_set():
            return True
        held.proxy, held.link, held.data = self, link, data
        held.is_reached.set()
        held.is_released.wait()
        return held.is_passed_on

    def _question(self, link: Any, data: bytes) -> Place | None:
        if data[:1] not in (QUERY, PARSE):
            if found := _SESSION.search(data):
                self._sessions[link] = found[1]
            return None
        session = self._sessions.get(link, b"")
        if session in OF_PARENTS:
            return None
        text = self._text_of(link, data)
        self._asked[link] = text if session == OF_FEEDER else self.counted.place_of(text)
        asked = self._asked[link]
        return asked if isinstance(asked, Place) else None

    def _answer(self, link: Any, data: bytes) -> Place | None:
        asked = self._asked.pop(link, None)
        if isinstance(asked, str):
            if "UPDATE" not in asked or not has_row(data):
                return None
            self.counted.claims.add(asked)
            return self.counted.place_of(asked)
        return asked

    def _text_of(self, link: Any, data: bytes) -> str:
        parts = data[5:].split(b"\0")
        text = " ".join(_VALUE.sub("?", parts[0 if data[:1] == QUERY else 1].decode()).split())
        if found := _PREPARED.match(text):
            name = (link, found[2])
            self._prepared.setdefault(name, text[found.end() :])
            return f"{found[1]}{self._prepared[name]}"
        return text


def has_row(data: bytes) -> bool:
    """Return whether an answer has a row."""
    at = 0
    while at < len(data) and data[at : at + 1] != ROW:
        at += 1 + int.from_bytes(data[at + 1 : at + 5], "big")
    return at < len(data)
