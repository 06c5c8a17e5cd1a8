"""The task of bench/capture.py."""

from django_pglock import task


@task
def reindex(ids: list[int]) -> None:
    """Do nothing: nothing runs it."""
