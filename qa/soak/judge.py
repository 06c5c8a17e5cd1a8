"""Whether the guarantees hold for the tasks of one round, from rows alone. The verdicts are those of qa/chaos."""

from __future__ import annotations

from uuid import UUID

from django_pglock.models import Task
from qa.chaos.evidence import FINISHED, Evidence, Finding, RunRow, TaskRow
from qa.chaos.experiment import Experiment, run_row
from qa.soak.load import Enqueued
from tests.conftest import wait_until
from tests.sample import soak_tasks
from tests.sample.models import Effect, Run


class Judge:
    """Judge round after round. The runs of a round are deleted one round later: runs of one key may overlap both."""

    def __init__(self) -> None:
        self._judged: list[int] = []

    def judge(self, enqueued: Enqueued, experiment: Experiment) -> tuple[list[int], list[str]]:
        """Wait until all tasks have ended. Return those that had to end, and all violations; forget older runs."""
        # Where COMMIT failed, the table says what was enqueued.
        exist: list[int] = []
        unknown = Task.objects.filter(pk__in=enqueued.unknown)
        wait_until(lambda: exist.extend(unknown.values_list("pk", flat=True)) or True, "the database is away")
        ids = sorted({*enqueued.committed, *exist})
        unfinished = Task.objects.filter(pk__in=ids).exclude(status__in=FINISHED)
        wait_until(lambda: not unfinished.exists(), "some task is not finished")
        return ids, [
            f"{each.verdict}: task {each.task} {each.text}" for each in self._findings(ids, enqueued, experiment)
        ]

    def _findings(self, ids: list[int], enqueued: Enqueued, experiment: Experiment) -> list[Finding]:
        runs = [run_row(run) for run in Run.objects.all()]
        workers = {run.worker for run in runs}
        effects = _effects(enqueued)
        evidence = Evidence(
            enqueued=ids,
            tasks=[_task(task, is_group=task.pk in enqueued.serials) for task in Task.objects.filter(pk__in=ids)],
            runs=[*runs, *effects],
            absences=[absence for absence in experiment.absences() if absence.worker in workers],
        )
        findings = evidence.findings(may_fail=enqueued.cancelled)
        Run.objects.filter(task__in=self._judged).delete()
        Effect.objects.filter(name__in=_names(enqueued)).delete()
        self._judged = ids
        return findings


def _task(task: Task, *, is_group: bool) -> TaskRow:
    # The calls of a group have one return value, which cannot name the attempt of each.
    return TaskRow(task.pk, task.status, task.attempts, task.attempts if is_group else task.result)


def _names(enqueued: Enqueued) -> dict[str, int]:
    return {soak_tasks.GROUP_EFFECT.format(serial=serial): task for task, serial in enqueued.serials.items()}


def _effects(enqueued: Enqueued) -> list[RunRow]:
    """Return each effect of a group call as the run of an atomic task."""
    tasks = _names(enqueued)
    rows = Effect.objects.filter(name__in=tasks).values_list("pk", "name")
    return [RunRow(tasks[name], pk, UUID(int=0), 0.0, 0.0, is_atomic=True) for pk, name in rows]
