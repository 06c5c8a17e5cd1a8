"""What to write instead of options and methods of other task queues that tasks do not have here."""

from __future__ import annotations

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


def about_method(name: str, path: str) -> str:
    """Return what to write instead of one of ``METHODS``."""
    ours = METHODS[name]
    here = ours if ours.startswith("raise") else f"{path.rpartition('.')[2]}.{ours}"
    return f"{path} is a task, and tasks have no {name}. Write {here}."
