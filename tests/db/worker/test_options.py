"""Options that are refused, on the command line and in Python."""

from __future__ import annotations

import pytest

from django_pglock.errors import ConfigurationError
from django_pglock.worker import Worker as Process

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"using": "nope"}, "DATABASES has no alias 'nope'. Its aliases: default"),
        ({"threads": 0}, "threads: '0' is not a number from 1 to 1000"),
        ({"threads": True}, "threads: 'True' is not a number from 1"),
        ({"grace": -1}, "grace: '-1' is not a number of seconds, 0 or larger"),
        ({"grace": float("nan")}, "grace: 'nan' is not a number of seconds"),
        ({"max_tasks": 0}, "max_tasks: '0' is not a number from 1"),
        ({"max_memory": 0}, "max_memory: '0' is not a number of MiB above zero"),
        ({"max_memory": -1}, "max_memory: '-1' is not a number of MiB above zero"),
        ({"max_time": -1}, "max_time: '-1' is not a number of seconds above zero"),
        ({"probe_port": 65536}, "probe_port: '65536' is not a port from 0"),
        ({"probe_host": "127.0.0.1"}, "but no port"),
        ({"heartbeat_file": ""}, "heartbeat file is empty"),
    ],
)
def test_a_worker_in_python_refuses_the_options_that_the_command_refuses(options, text):
    """Without threads or a database, a draining worker would never end."""
    with pytest.raises(ConfigurationError, match=text):
        Process(drain=True, **options)
