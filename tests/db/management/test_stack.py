"""The work of ``locktasks stack``: a sentence for each reason for which there is no stack."""

from __future__ import annotations

import pytest
from django.core.management import CommandError

from django_pglock.management.commands import locktasks as command
from django_pglock.store.requests_to_worker import answer_stack, request_stack
from tests.db.management.commands.test_locktasks import locktasks
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def answered(mine, monkeypatch):
    """The worker answers at once, with this text."""

    def answer(text):
        def request(using, task):
            assert request_stack(using, task)
            answer_stack(using, task, mine.attempt, mine.worker, text)
            return True

        monkeypatch.setattr(command, "request_stack", request)
        return locktasks("stack", mine.id)

    return answer


def test_control_characters_of_a_stack_are_not_printed(answered):
    assert answered('File "a.py", line 1\n  \x1b[2J\n') == 'File "a.py", line 1\n  ?[2J\n'


def test_an_empty_stack_says_that_the_function_does_not_run(answered, mine):
    with pytest.raises(CommandError, match=f"The function of task {mine.id} does not run"):
        answered("")


def test_a_worker_that_does_not_answer_in_time_is_reported(mine, monkeypatch):
    monkeypatch.setattr(command, "STACK_TIMEOUT", 0.0)
    with pytest.raises(CommandError, match="The worker has not answered"):
        locktasks("stack", mine.id)


def test_a_task_that_waits_and_one_that_does_not_exist_have_different_sentences():
    waiting = int(tasks.nothing.enqueue().id)
    for task, text in ((waiting, f"Task {waiting} is not running"), (waiting + 1, f"There is no task {waiting + 1}")):
        with pytest.raises(CommandError, match=text):
            locktasks("stack", task)
