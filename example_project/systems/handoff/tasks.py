"""The hand-off with tasks: the front end calls ``create.enqueue(…)`` and ``update.enqueue(…)``."""

from django_pglock import Unique, task
from example_project.systems.handoff.models import Sheet


@task(lock="sheet:{sheet}", unique=Unique("{sheet}", while_="unfinished"), atomic=True)
def create(sheet: str) -> None:
    Sheet.objects.get_or_create(name=sheet)


@task(lock="sheet:{sheet}", group="sheet:{sheet}", atomic=True)
def update(calls: list[dict[str, str]]) -> None:
    Sheet.objects.get(name=calls[0]["sheet"]).append([call["line"] for call in calls])
