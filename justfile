# The five things that a contributor does. `just --list` shows them; CONTRIBUTING.md says more.

# Run the suite, or a part of it: just test tests/db -k lock
test *ARGS:
    python3 manage.py test {{ARGS}}

# Check style, types, floors and documentation.
check:
    .venv/bin/python -m pip install --quiet -e ".[dev]"
    .venv/bin/tox run -e lint,types,floors,docs

# Run a folder of qa/: just qa acceptance
qa FOLDER *ARGS:
    .venv/bin/tox run -e {{FOLDER}} -- {{ARGS}}

# Measure against other queues and a loop of psycopg: just bench drain
bench *ARGS:
    .venv/bin/python bench/tasks.py {{ARGS}}

# Build what PyPI would get, and test it.
release:
    .venv/bin/tox run -e release
