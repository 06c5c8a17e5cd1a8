"""Who takes part. The order is that of the tables."""

from bench.contestants.base import Contestant
from bench.contestants.celery_redis import CeleryRedis
from bench.contestants.chancy_queue import Chancy
from bench.contestants.dbos_queue import Dbos
from bench.contestants.django_absurd import DjangoAbsurd
from bench.contestants.django_ox import DjangoOx
from bench.contestants.django_tasks_db import DjangoTasksDb
from bench.contestants.dramatiq_redis import Dramatiq
from bench.contestants.graphile import Graphile
from bench.contestants.huey_redis import Huey
from bench.contestants.oban import Oban
from bench.contestants.ours import Ours
from bench.contestants.pgqueuer import PgQueuer
from bench.contestants.procrastinate import Procrastinate
from bench.contestants.raw import Raw

ALL: tuple[type[Contestant], ...] = (
    Ours,
    Raw,
    Graphile,
    PgQueuer,
    CeleryRedis,
    Dramatiq,
    Huey,
    Procrastinate,
    Oban,
    Chancy,
    Dbos,
    DjangoOx,
    DjangoAbsurd,
    DjangoTasksDb,
)
