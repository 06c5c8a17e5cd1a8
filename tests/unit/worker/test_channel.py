"""The channel between the parent and a child."""

from __future__ import annotations

import socket
import threading

import pytest

from django_pglock.worker import channel as module
from django_pglock.worker.channel import Channel, new_loop
from tests.conftest import NEVER


@pytest.fixture
def ends():
    first, second = map(Channel, socket.socketpair())
    yield first, second
    first.close()
    second.close()


def test_messages_arrive_in_order(ends):
    first, second = ends
    assert list(second.receive()) == []
    first.send(wake=["mail", 0])
    first.send(cancel=[[1, 2]], text="line\nline")
    assert list(second.receive()) == [{"wake": ["mail", 0]}, {"cancel": [[1, 2]], "text": "line\nline"}]
    assert list(second.receive()) == []


def test_messages_that_the_caller_does_not_take_are_kept(ends):
    """The child takes its options, and the rest when it runs: ``drain`` may come with them."""
    first, second = ends
    first.send(start=1)
    first.send(drain=True)
    assert next(second.receive()) == {"start": 1}
    assert list(second.receive()) == [{"drain": True}]


def test_a_message_that_is_no_json_does_not_keep_others_from_being_read(ends):
    """A function may write to all files of its process."""
    first, second = ends
    first._socket.send(b"print\n")
    first.send(ready=[])
    with pytest.raises(ValueError, match="Expecting"):
        list(second.receive())
    assert list(second.receive()) == [{"ready": []}]


def test_to_send_never_waits_and_whole_messages_are_dropped(ends, monkeypatch):
    monkeypatch.setattr(module, "MOST_KEPT", 10_000)
    first, second = ends
    for number in range(10_000):
        first.send(number=number, text="x" * 1000)
    assert len(first._unsent) < 12_000
    first.send(number=-1)
    messages = []
    while not messages or first._unsent:
        messages += second.receive()
        first.flush()
    messages += second.receive()
    numbers = [each["number"] for each in messages]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) < 10_000


def test_messages_of_several_threads_are_not_mixed(ends):
    first, second = ends
    senders = [
        threading.Thread(target=lambda: [first.send(text="x" * 3000) or first.flush() for _ in range(50)])
        for _ in range(4)
    ]
    for each in senders:
        each.start()
    messages = []
    while len(messages) < 200:
        messages += second.receive()
        # What the buffer of the socket does not take is sent later.
        first.flush()
    assert messages == [{"text": "x" * 3000}] * 200
    for each in senders:
        each.join()


def test_an_end_is_not_closed_while_another_thread_sends(ends):
    """Its number would belong to the next file that is opened, perhaps to the channel of another child."""
    first, second = ends
    sending, go_on, closing = threading.Event(), threading.Event(), threading.Thread(target=first.close)
    whole = first.is_own

    def is_own():
        sending.set()
        assert go_on.wait(NEVER)
        return whole()

    first.is_own = is_own
    sender = threading.Thread(target=lambda: first.send(wake=["mail", 0]))
    sender.start()
    assert sending.wait(NEVER)
    closing.start()
    go_on.set()
    for each in (sender, closing):
        each.join()
    assert list(second.receive()) == [{"wake": ["mail", 0]}]
    assert second.is_over


def test_the_end_of_the_other_side_is_noticed_after_its_last_message(ends):
    first, second = ends
    first.send(left_behind=[])
    first.close()
    assert list(second.receive()) == [{"left_behind": []}]
    assert second.is_over
    second.send(drain=True)
    assert list(second.receive()) == []


def test_a_reset_is_an_end(ends):
    """As when the other side has died with messages unread."""
    first, second = ends
    second.send(beat=1)
    first.close()
    assert list(second.receive()) == []
    assert second.is_over


def test_an_error_of_a_call_ends_neither_the_loop_nor_the_other_calls(ends, caplog):
    (first, second), loop = ends, new_loop()
    loop.add_reader(second.fileno(), lambda: [*second.receive(), 1 / 0])
    loop.call_later(0.0, lambda: 1 / 0)
    loop.call_later(0.05, loop.stop)
    first.send(number=1)
    loop.run_forever()
    loop.close()
    assert caplog.text.count("The worker met an error, and continues.") == 2
    assert caplog.text.count("ZeroDivisionError") >= 2
