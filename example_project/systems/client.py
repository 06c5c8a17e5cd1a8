"""``python -m example_project.systems.client MODULE:FUNCTION JSON...``: call a function in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import sys


def main(path: str, *arguments: str) -> None:
    """Set up Django, then call the function with the arguments, each of which is JSON."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    import django

    django.setup()
    module, _, name = path.partition(":")
    getattr(importlib.import_module(module), name)(*map(json.loads, arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
