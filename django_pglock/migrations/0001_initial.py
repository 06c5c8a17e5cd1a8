"""The schema of the first release: twelve tables, their storage parameters, and the view of advisory locks."""

from django.db import migrations, models
from django.db.models import Q
from django.db.models.functions import Now

from django_pglock.migrations._operations import PlainSQL
from django_pglock.models.base import CountsField, OnPostgreSQL
from django_pglock.tasks.states import READABLE

# The view of advisory locks. A key is a lock of one bigint (objsubid 1): PostgreSQL stores its halves in classid and objid.
# The package's own locks are of two ints (objsubid 2); classid says what the lock is for (keys/reserved.py). They get no key,
# because the same 64 bits may be the key of another lock. Names come from the comments in the statements of holders and
# waiters; each comment says which key it names, because a waiter's statement also names the locks that it holds.
VIEW = r"""
CREATE VIEW "django_pglock_advisorylock" AS
WITH held AS (
    SELECT l.classid::bigint AS class, l.objid::bigint AS number, l.objsubid AS space,
           CASE WHEN l.objsubid = 1 THEN (l.classid::bigint << 32) | l.objid::bigint END AS key,
           CASE l.mode WHEN 'ShareLock' THEN 'shared' ELSE 'exclusive' END AS mode,
           l.granted AS is_granted, l.pid, l.waitstart,
           a.application_name, a.state, a.usename::text AS username, a.client_addr::text AS client_address, a.query,
           a.xact_start, a.query_start
    FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
    WHERE l.locktype = 'advisory'
      AND (l.objsubid = 1 OR l.objsubid = 2 AND l.classid IN (1885826049, 1885826050, 1885826051))
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
SELECT pid || '-' || COALESCE(key::text, class || '.' || number) || '-' || mode
           || CASE WHEN is_granted THEN '' ELSE '-waiting' END AS id,
       key,
       COALESCE(
           max(replace(substring(query FROM '/\* django_pglock:' || key || ' (.*?) \*/'), '％', '%')) OVER (PARTITION BY space, class, number),
           CASE WHEN space = 2 THEN CASE class
               WHEN 1885826049 THEN 'upkeep of tasks'
               WHEN 1885826050 THEN 'admission of tasks'
               WHEN 1885826051 THEN 'worker ' || COALESCE({worker}, number::text) END END
       ) AS name,
       mode, is_granted, pid,
       (count(*) FILTER (WHERE NOT is_granted) OVER (PARTITION BY space, class, number))::int AS waiters,
       CASE WHEN is_granted THEN '[]'::jsonb ELSE to_jsonb(pg_blocking_pids(pid)) END AS blocked_by,
       CASE WHEN is_granted THEN COALESCE(xact_start, query_start) ELSE waitstart END AS since,
       COALESCE(application_name, '') AS application_name, state, username, client_address, query
FROM held
"""
# The row of a dead worker may have the same number, so the latest heartbeat decides.
WORKER = """(
    SELECT w.name FROM "django_pglock_worker" AS w
    WHERE w.lock_key = held.number ORDER BY w.heartbeat_at DESC LIMIT 1)"""
#: Options of each model: in a database of another vendor there is no table. See models/base.py.
POSTGRESQL = {name: getattr(OnPostgreSQL, name) for name in ("required_db_features", "required_db_vendor")}
MANAGERS = [("for_dumpdata", models.Manager())]
STATUSES = [
    ("SCHEDULED", "Scheduled"),
    ("BLOCKED", "Blocked"),
    ("READY", "Ready"),
    ("RUNNING", "Running"),
    ("SUCCESSFUL", "Successful"),
    ("FAILED", "Failed"),
    ("CANCELLED", "Cancelled"),
]


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="AdvisoryLock",
            fields=[
                ("id", models.TextField(primary_key=True, serialize=False)),
                ("key", models.BigIntegerField(help_text="Empty: one of the package's own locks.", null=True, verbose_name="key")),
                ("name", models.TextField(null=True, verbose_name="name")),
                ("mode", models.CharField(max_length=16, verbose_name="mode")),
                ("is_granted", models.BooleanField(verbose_name="held")),
                ("pid", models.IntegerField(verbose_name="session")),
                ("waiters", models.IntegerField(help_text="Sessions that wait for this key.", verbose_name="waiters")),
                ("blocked_by", models.JSONField(help_text="Sessions that this one waits for.", verbose_name="blocked by")),
                ("since", models.DateTimeField(help_text="Start of the wait or, for a holder, of its transaction or last statement.", null=True, verbose_name="since")),
                ("application_name", models.TextField(verbose_name="application")),
                ("state", models.TextField(null=True, verbose_name="state")),
                ("username", models.TextField(null=True, verbose_name="user")),
                ("client_address", models.TextField(null=True, verbose_name="client")),
                ("query", models.TextField(null=True, verbose_name="last statement")),
            ],
            options={
                "verbose_name": "advisory lock",
                "verbose_name_plural": "advisory locks",
                "db_table": "django_pglock_advisorylock",
                "ordering": ["key", "-is_granted", "since", "pid"],
                "permissions": [
                    ("terminate_advisorylock", "Can end sessions that hold or wait for advisory locks"),
                ],
                "managed": False,
                "default_permissions": ("view",),
                **POSTGRESQL,
                "base_manager_name": "for_dumpdata",
            },
            managers=MANAGERS,
        ),
        migrations.CreateModel(
            name="Lease",
            fields=[
                ("key", models.BigIntegerField(primary_key=True, serialize=False, verbose_name="key")),
                ("name", models.TextField(verbose_name="name")),
                ("owner", models.TextField(verbose_name="owner")),
                ("holder", models.UUIDField(help_text="The id of the only handle that may renew the lease.", verbose_name="holder")),
                ("token", models.BigIntegerField(help_text="Grows with each holder; use it as a fencing token.", verbose_name="token")),
                ("ttl", models.DurationField(help_text="The lease expires this long after its last renewal.", null=True, verbose_name="lifetime")),
                ("acquired_at", models.DateTimeField(verbose_name="acquired at")),
                ("renewed_at", models.DateTimeField(verbose_name="renewed at")),
                ("expires_at", models.DateTimeField(null=True, verbose_name="expires at")),
                ("released_at", models.DateTimeField(null=True, verbose_name="released at")),
            ],
            options={
                "verbose_name": "lease",
                "verbose_name_plural": "leases",
                "ordering": ["name"],
                "permissions": [
                    ("free_lease", "Can take a lease away from its holder"),
                ],
                "default_permissions": ("view",),
                **POSTGRESQL,
                "indexes": [
                    models.Index(fields=["-acquired_at"], name="django_pglock_lease_recent"),
                    models.Index(condition=Q(("released_at", None)), fields=["-acquired_at"], name="django_pglock_lease_held"),
                ],
            },
            managers=MANAGERS,
        ),
        migrations.CreateModel(
            name="Queue",
            fields=[
                ("name", models.CharField(max_length=128, primary_key=True, serialize=False, verbose_name="name")),
                ("paused_at", models.DateTimeField(editable=False, null=True, verbose_name="paused at")),
                ("paused_by", models.CharField(blank=True, default="", max_length=255, verbose_name="paused by")),
                ("reason", models.TextField(blank=True, default="", verbose_name="reason")),
            ],
            options={
                "verbose_name": "queue",
                "verbose_name_plural": "queues",
                "ordering": ["name"],
                "permissions": [
                    ("pause_queue", "Can pause and resume queues"),
                ],
                "default_permissions": ("view", "delete"),
                **POSTGRESQL,
            },
            managers=MANAGERS,
        ),
        migrations.CreateModel(
            name="Schedule",
            fields=[
                ("name", models.CharField(max_length=512, primary_key=True, serialize=False, verbose_name="name")),
                ("task_path", models.CharField(max_length=512, verbose_name="task function")),
                ("args", models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, verbose_name="arguments")),
                ("kwargs", models.JSONField(blank=True, db_default=models.Value({}, models.JSONField()), default=dict, verbose_name="keyword arguments")),
                ("expression", models.CharField(help_text="An interval, such as every 5 minutes, or the five fields of cron, such as 30 7 * * 1-5.", max_length=255, verbose_name="when")),
                ("timezone", models.CharField(blank=True, db_default="", default="", help_text="Of cron. Empty: TIME_ZONE.", max_length=64, verbose_name="time zone")),
                ("note", models.TextField(blank=True, db_default="", default="", verbose_name="note")),
                ("versions", models.JSONField(db_default=models.Value([], models.JSONField()), editable=False, help_text="What code has said, the newest first. Code with an earlier version does not change the row.", verbose_name="versions")),
                ("is_enabled", models.BooleanField(db_default=True, default=True, verbose_name="enabled")),
                ("next_at", models.DateTimeField(db_default=Now(), editable=False, help_text="The tick that is enqueued next.", verbose_name="next tick")),
                ("last_at", models.DateTimeField(editable=False, help_text="The tick that was enqueued last.", null=True, verbose_name="last tick")),
                ("last_task", models.BigIntegerField(editable=False, null=True, verbose_name="last task")),
            ],
            options={
                "verbose_name": "schedule",
                "verbose_name_plural": "schedules",
                "ordering": ["next_at"],
                **POSTGRESQL,
                "constraints": [
                    models.CheckConstraint(condition=Q(("last_at__range", READABLE), ("next_at__range", READABLE)), name="pglock_schedule_dates"),
                ],
            },
            managers=MANAGERS,
        ),
        migrations.CreateModel(
            name="Worker",
            fields=[
                ("id", models.UUIDField(editable=False, primary_key=True, serialize=False, verbose_name="id")),
                ("parent", models.UUIDField(editable=False, help_text="The process that has started the worker, and beats and listens for it.", verbose_name="parent")),
                ("name", models.CharField(max_length=128, verbose_name="name")),
                ("hostname", models.CharField(max_length=255, verbose_name="host")),
                ("pid", models.IntegerField(verbose_name="process id")),
                ("queues", models.JSONField(help_text="Empty: all queues.", verbose_name="queues")),
                ("threads", models.SmallIntegerField(verbose_name="threads")),
                ("task_paths", models.JSONField(db_default=models.Value([], models.JSONField()), help_text="The task functions that this worker can run, and their schedules.", verbose_name="task functions")),
                ("lock_key", models.IntegerField(help_text="Number of the advisory lock that the session of the parent holds. Empty behind a pooler.", null=True, verbose_name="lock key")),
                ("is_sleeping", models.BooleanField(db_default=False, help_text="The worker is idle and wants a NOTIFY for new tasks.", verbose_name="sleeping")),
                ("is_stopping", models.BooleanField(db_default=False, verbose_name="stopping")),
                ("started_at", models.DateTimeField(db_default=Now(), verbose_name="started at")),
                ("heartbeat_at", models.DateTimeField(db_default=Now(), verbose_name="heartbeat at")),
            ],
            options={
                "verbose_name": "worker",
                "verbose_name_plural": "workers",
                "ordering": ["started_at"],
                **POSTGRESQL,
            },
            managers=MANAGERS,
        ),
        migrations.CreateModel(
            name="RateLimit",
            fields=[
                ("key", models.CharField(max_length=512, primary_key=True, serialize=False, verbose_name="key")),
                ("arrives_at", models.DateTimeField(verbose_name="next token at")),
                ("opens_at", models.DateTimeField(null=True, verbose_name="tasks wait until")),
            ],
            options={
                "verbose_name": "rate limit",
                "verbose_name_plural": "rate limits",
                "default_permissions": ("view",),
                **POSTGRESQL,
                "indexes": [
                    models.Index(condition=Q(("opens_at__isnull", False)), fields=["opens_at"], name="pglock_rate_opens"),
                ],
            },
            managers=MANAGERS,
        ),
        migrations.CreateModel(
            name="Task",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False, verbose_name="id")),
                ("status", models.CharField(choices=STATUSES, db_default="READY", max_length=16, verbose_name="status")),
                ("queue", models.CharField(max_length=128, verbose_name="queue")),
                ("priority", models.SmallIntegerField(db_default=0, help_text="Higher runs first.", verbose_name="priority")),
                ("task_path", models.CharField(max_length=512, verbose_name="task function")),
                ("args", models.JSONField(db_default=models.Value([], models.JSONField()), verbose_name="arguments")),
                ("kwargs", models.JSONField(db_default=models.Value({}, models.JSONField()), verbose_name="keyword arguments")),
                ("backend", models.CharField(max_length=64, verbose_name="backend")),
                ("retries", models.SmallIntegerField(db_default=0, help_text="Failed attempts that were retried.", verbose_name="retries")),
                ("max_retries", models.SmallIntegerField(db_default=0, verbose_name="maximum retries")),
                ("attempts", models.IntegerField(db_default=0, help_text="Claims so far: the fencing token.", verbose_name="attempts")),
                ("uncounted", models.IntegerField(db_default=0, help_text="Claims that do not count as attempts: given back or snoozed.", verbose_name="uncounted claims")),
                ("rescues", models.SmallIntegerField(db_default=0, help_text="Number of times the worker or the session died that ran the task.", verbose_name="rescues")),
                ("worker", models.UUIDField(editable=False, null=True, verbose_name="worker")),
                ("lock_key", models.CharField(help_text="Limits how many tasks with the same key run at once.", max_length=512, null=True, verbose_name="lock key")),
                ("concurrency", models.SmallIntegerField(help_text="How many tasks with the same lock key may run at once.", null=True, verbose_name="concurrency")),
                ("group_key", models.CharField(help_text="Waiting tasks with the same key run in one call.", max_length=512, null=True, verbose_name="group key")),
                ("fair_key", models.CharField(help_text="Tasks with different keys take turns.", max_length=512, null=True, verbose_name="fair key")),
                ("unique_key", models.CharField(max_length=512, null=True, verbose_name="unique key")),
                ("unique_scope", models.CharField(choices=[("WAITING", "while waiting"), ("UNFINISHED", "while not finished"), ("PERIOD", "for a period")], max_length=16, null=True, verbose_name="unique")),
                ("unique_until", models.DateTimeField(null=True, verbose_name="unique until")),
                ("waits_for", models.IntegerField(db_default=0, help_text="Number of tasks that have to finish before this one.", verbose_name="waits for")),
                ("cancel_requested_at", models.DateTimeField(null=True, verbose_name="cancel requested at")),
                ("run_after", models.DateTimeField(null=True, verbose_name="run after")),
                ("enqueued_at", models.DateTimeField(db_default=Now(), verbose_name="enqueued at")),
                ("started_at", models.DateTimeField(null=True, verbose_name="started at")),
                ("last_attempted_at", models.DateTimeField(null=True, verbose_name="last attempted at")),
                ("finished_at", models.DateTimeField(null=True, verbose_name="finished at")),
                ("keep_result", models.IntegerField(help_text="Seconds for which the row is kept after the task has finished.", null=True, verbose_name="keep result")),
                ("expires_at", models.DateTimeField(null=True, verbose_name="expires at")),
                ("fingerprint", models.BigIntegerField(editable=False, null=True, verbose_name="fingerprint")),
                ("progress", models.JSONField(null=True, verbose_name="progress")),
                ("stack", models.JSONField(editable=False, null=True, verbose_name="stack")),
                ("result", models.JSONField(null=True, verbose_name="result")),
                ("log", models.TextField(editable=False, help_text="Log records of the last attempt.", null=True, verbose_name="log")),
                ("meta", models.JSONField(db_default=models.Value({}, models.JSONField()), verbose_name="meta")),
            ],
            options={
                "verbose_name": "task",
                "verbose_name_plural": "tasks",
                "ordering": ["-id"],
                "permissions": [
                    ("retry_task", "Can retry tasks"),
                    ("cancel_task", "Can cancel tasks"),
                    ("reset_task", "Can reset stuck tasks"),
                    ("export_task", "Can export tasks"),
                    ("stack_task", "Can see the stacks of running tasks"),
                ],
                **POSTGRESQL,
                "indexes": [
                    models.Index(condition=Q(("fair_key__isnull", True), ("status", "READY")), fields=["queue", "-priority", "id"], name="pglock_task_ready"),
                    models.Index(condition=Q(("fair_key__isnull", False), ("status", "READY")), fields=["queue", "fair_key", "-priority", "id"], name="pglock_task_fair"),
                    models.Index(condition=Q(("finished_at__isnull", True), ("lock_key__isnull", False)), fields=["lock_key", "status", "id"], name="pglock_task_lock"),
                    models.Index(condition=Q(Q(Q(("started_at__isnull", False), ("status", "SCHEDULED")), Q(("status", "BLOCKED"), ("worker__isnull", False)), _connector="OR"), ("lock_key__isnull", False)), fields=["lock_key"], name="pglock_task_keeps"),
                    models.Index(condition=Q(("expires_at__isnull", False)), fields=["expires_at"], name="pglock_task_expires"),
                    models.Index(condition=Q(("status", "SCHEDULED")), fields=["run_after", "id"], name="pglock_task_due"),
                    models.Index(condition=Q(("status", "RUNNING")), fields=["worker", "id"], name="pglock_task_running"),
                    models.Index(condition=Q(("status", "SUCCESSFUL"), _negated=True), fields=["status", "id"], name="pglock_task_attention"),
                    models.Index(condition=Q(("status", "FAILED")), fields=["fingerprint", "id"], include=["finished_at", "queue"], name="pglock_task_fingerprint"),
                ],
                "constraints": [
                    models.UniqueConstraint(condition=Q(Q(("attempts", 0), ("finished_at__isnull", True), ("unique_scope", "WAITING")), Q(("finished_at__isnull", True), ("unique_scope", "UNFINISHED")), ("unique_scope", "PERIOD"), _connector="OR"), fields=("unique_key",), name="pglock_task_unique"),
                    models.CheckConstraint(condition=models.Case(models.When(status="READY", then=Q(("finished_at__isnull", True))), models.When(status="RUNNING", then=Q(("finished_at__isnull", True), ("last_attempted_at__isnull", False), ("worker__isnull", False))), models.When(status="SCHEDULED", then=Q(("finished_at__isnull", True), ("run_after__isnull", False))), models.When(status="BLOCKED", then=Q(("finished_at__isnull", True), Q(("lock_key__isnull", False), ("waits_for__gt", 0), _connector="OR"))), models.When(status="CANCELLED", then=Q(("finished_at__isnull", False))), models.When(status="FAILED", then=Q(("finished_at__isnull", False))), models.When(status="SUCCESSFUL", then=Q(("finished_at__isnull", False))), default=models.Value(False), output_field=models.BooleanField()), name="pglock_task_status"),
                    models.CheckConstraint(condition=Q(("unique_key__isnull", True), ("unique_scope__isnull", False), _connector="OR"), name="pglock_task_unique_has_scope"),
                    models.CheckConstraint(condition=Q(("priority__range", (-100, 100)), Q(("concurrency__gt", 0), ("concurrency__lt", 0), _connector="OR"), ("attempts__gte", models.F("uncounted")), ("fair_key__gt", ""), ("uncounted__gte", 0)), name="pglock_task_bounds"),
                    models.CheckConstraint(condition=Q(("run_after__range", READABLE)), name="pglock_task_run_after"),
                ],
            },
            managers=MANAGERS,
        ),
        migrations.CreateModel(
            name="Attempt",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False, verbose_name="id")),
                ("task", models.ForeignKey(db_constraint=False, db_index=False, on_delete=models.CASCADE, related_name="failures", to="django_pglock.task", verbose_name="task")),
                ("number", models.IntegerField(help_text="Number of claims of the task, including this one.", verbose_name="number")),
                ("worker", models.UUIDField(help_text="Empty: the task never ran.", null=True, verbose_name="worker")),
                ("worker_name", models.CharField(max_length=128, null=True, verbose_name="worker")),
                ("started_at", models.DateTimeField(verbose_name="started at")),
                ("finished_at", models.DateTimeField(verbose_name="finished at")),
                ("outcome", models.CharField(choices=[("FAILED", "Failed"), ("LOST", "Lost with its worker")], max_length=16, verbose_name="outcome")),
                ("exception_path", models.CharField(max_length=512, verbose_name="exception")),
                ("traceback", models.TextField(verbose_name="traceback")),
                ("cause", models.BigIntegerField(help_text="Its end has cancelled this task.", null=True, verbose_name="because of task")),
                ("log", models.TextField(null=True, verbose_name="log")),
            ],
            options={
                "verbose_name": "attempt",
                "verbose_name_plural": "attempts",
                "ordering": ["task", "number"],
                **POSTGRESQL,
                "indexes": [models.Index(condition=Q(("cause__isnull", False)), fields=["cause"], name="pglock_attempt_cause")],
                "constraints": [
                    models.UniqueConstraint(fields=("task", "number"), name="pglock_attempt_number"),
                    models.CheckConstraint(condition=Q(("outcome__in", ["FAILED", "LOST"])), name="pglock_attempt_outcome"),
                ],
            },
            managers=MANAGERS,
        ),
        migrations.CreateModel(
            name="Waiter",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False, verbose_name="id")),
                ("awaited", models.BigIntegerField(verbose_name="awaited")),
                ("task", models.ForeignKey(db_constraint=False, null=True, on_delete=models.CASCADE, related_name="awaiting", to="django_pglock.task", verbose_name="task")),
                ("has_ended", models.BooleanField(null=True)),
            ],
            options={
                "verbose_name": "waiter",
                "verbose_name_plural": "waiters",
                "default_permissions": (),
                **POSTGRESQL,
                "indexes": [
                    models.Index("awaited", models.F("task") + 0, name="pglock_waiter_awaited"),
                ],
            },
            managers=MANAGERS,
        ),
        migrations.CreateModel(
            name="Step",
            fields=[
                ("pk", models.CompositePrimaryKey("task_id", "name", blank=True, editable=False, primary_key=True, serialize=False)),
                ("task", models.ForeignKey(db_constraint=False, db_index=False, on_delete=models.CASCADE, related_name="steps", to="django_pglock.task")),
                ("name", models.CharField(max_length=200)),
                ("number", models.IntegerField()),
                ("kind", models.CharField(max_length=16)),
                ("event", models.CharField(db_collation="C", max_length=200, null=True)),
                ("result", models.JSONField(null=True)),
                ("failure", models.JSONField(null=True)),
                ("attempt", models.IntegerField()),
                ("started_at", models.DateTimeField()),
                ("finished_at", models.DateTimeField(null=True)),
            ],
            options={
                "default_permissions": (),
                **POSTGRESQL,
                "indexes": [
                    models.Index(condition=Q(("event__isnull", False), ("finished_at__isnull", True)), fields=["event", "task"], name="pglock_step_event"),
                ],
            },
            managers=MANAGERS,
        ),
        migrations.CreateModel(
            name="Event",
            fields=[
                ("name", models.CharField(db_collation="C", max_length=200, primary_key=True, serialize=False, verbose_name="name")),
                ("payload", models.JSONField(null=True, verbose_name="payload")),
                ("emitted_at", models.DateTimeField(verbose_name="emitted at")),
                ("expires_at", models.DateTimeField(db_index=True, verbose_name="kept until")),
            ],
            options={
                "verbose_name": "event",
                "verbose_name_plural": "events",
                "default_permissions": ("add", "view", "delete"),
                **POSTGRESQL,
            },
            managers=MANAGERS,
        ),
        migrations.CreateModel(
            name="Number",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("seconds", models.IntegerField()),
                ("started_at", models.DateTimeField()),
                ("kind", models.CharField(max_length=16)),
                ("queue", models.CharField(blank=True, max_length=128)),
                ("task_path", models.CharField(blank=True, max_length=512)),
                ("count", models.BigIntegerField()),
                ("total", models.FloatField()),
                ("buckets", CountsField()),
            ],
            options={
                "verbose_name": "number",
                "verbose_name_plural": "numbers",
                "default_permissions": ("view",),
                **POSTGRESQL,
                "indexes": [
                    models.Index(fields=["seconds", "started_at"], name="pglock_number_since"),
                ],
                "constraints": [
                    models.UniqueConstraint(fields=("seconds", "task_path", "queue", "started_at", "kind"), name="pglock_number_of"),
                ],
            },
            managers=MANAGERS,
        ),
        # Each task row is updated at least twice and then read for weeks. The free space on its page takes the new row
        # versions. Vacuum runs after one dead row in a hundred instead of one in five, so claims meet few dead entries.
        PlainSQL(
            "task",
            """ALTER TABLE "django_pglock_task" SET (
                   fillfactor = 80, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_insert_scale_factor = 0.01,
                   autovacuum_analyze_scale_factor = 0.02)""",
        ),
        # A few rows, each updated every few seconds.
        PlainSQL(
            "worker",
            """ALTER TABLE "django_pglock_worker" SET (
                   fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 500)""",
        ),
        # Each worker updates the rows of the present hour every minute: in free space on their pages no index changes.
        PlainSQL(
            "number",
            'ALTER TABLE "django_pglock_number" SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05)',
        ),
        PlainSQL("advisorylock", VIEW, 'DROP VIEW "django_pglock_advisorylock"', {"worker": ("worker", WORKER)}),
    ]
