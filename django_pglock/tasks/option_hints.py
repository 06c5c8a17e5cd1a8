"""Options and methods of other task queues, and ours for each. For hints in messages about an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Collection

#: Options of decorators and calls in other task queues, and our options for the same purpose.
OPTIONS = {
    **dict.fromkeys(("attempts", "max_retries", "max_tries", "retries", "retry", "tries"), "max_attempts"),
    **dict.fromkeys(("default_retry_delay", "retry_backoff", "retry_delay", "retry_wait"), "backoff"),
    **dict.fromkeys(("autoretry_for", "retry_exceptions", "retry_for"), "retry_on"),
    **dict.fromkeys(("dont_autoretry_for", "throws"), "no_retry_on"),
    **dict.fromkeys(("job_timeout", "soft_time_limit", "time_limit"), "timeout"),
    **dict.fromkeys(("bind", "context", "pass_context"), "takes_context"),
    **dict.fromkeys(("ignore_result", "result_expires", "result_ttl"), "keep_result"),
    **dict.fromkeys(("lock_key", "ordering_key"), "lock"),
    **dict.fromkeys(("concurrency_limit", "max_concurrency"), "concurrency"),
    **dict.fromkeys(("once", "queueing_lock", "singleton", "unique_key", "uniqueness"), "unique"),
    **dict.fromkeys(("crontab", "periodic", "schedule"), "cron"),
    **dict.fromkeys(("countdown", "delay", "eta", "run_at", "schedule_at", "schedule_in", "wait"), "run_after"),
    **dict.fromkeys(("database", "using"), "backend"),
    "depends_on": "after",
    "headers": "meta",
    "interval": "every",
    "queue": "queue_name",
    "rate_limit": "rate",
    "transaction": "atomic",
    "tz": "timezone",
}
#: What other task queues have, and tasks here do not: what to do instead.
INSTEAD = {
    **dict.fromkeys(
        ("expire", "expires", "max_age", "ttl"),
        "a waiting task does not expire. Pass the date as an argument, and return from the function if it has passed.",
    ),
    **dict.fromkeys(
        ("acks_late", "reject_on_worker_lost"), "a task whose worker has died always runs again, so leave it out."
    ),
    **dict.fromkeys(
        ("link", "on_success"), "enqueue the other task with using(after=result), with the result of this one."
    ),
    **dict.fromkeys(
        ("link_error", "on_failure"), "handle the error in the function, or in a receiver of the signal task_finished."
    ),
}
#: Additional text after the name of an option.
NOTES = {
    "max_attempts": ", which counts the first attempt",
    "cron": " or every",
    "atomic": ", which makes the database effects of a task happen exactly once",
    "keep_result": ", the seconds after its end for which the row of a task is kept",
}
#: Methods of tasks in other task queues, and our code for the same purpose.
METHODS = {
    **dict.fromkeys(
        ("apply_async", "enqueue_at", "enqueue_in", "schedule", "send_with_options"), "using(…).enqueue(…)"
    ),
    **dict.fromkeys(("async_", "defer", "delay", "queue", "send", "submit"), "enqueue(…)"),
    **dict.fromkeys(("adelay", "aapply_async", "defer_async"), "aenqueue(…)"),
    **dict.fromkeys(("apply", "call_local", "fn", "now", "run"), "call(…)"),
    **dict.fromkeys(("configure", "options", "set", "with_options"), "using(…)"),
    "delay_on_commit": "enqueue_on_commit(…)",
    "retry": "raise Retry(…)",
}


def about_option(name: str, known: Collection[str]) -> str:
    """Return a hint to the option of ``known`` that an unknown name probably means: ``"write queue_name."``."""
    if name in INSTEAD:
        return INSTEAD[name]
    ours = OPTIONS.get(name)
    if ours is None or ours not in known:
        ours = next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.7)), None)
    if ours is None:
        return f"its options are {', '.join(sorted(known))}."
    return f"write {ours}{NOTES.get(ours, '')}."


def about_method(name: str, path: str) -> str:
    """Return what to write instead of one of ``METHODS``."""
    ours = METHODS[name]
    here = ours if ours.startswith("raise") else f"{path.rpartition('.')[2]}.{ours}"
    return f"{path} is a task, and tasks have no {name}. Write {here}."
