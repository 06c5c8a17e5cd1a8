"""The package has one more migration than it has."""

from tests.settings import *  # noqa: F403

MIGRATION_MODULES = {"django_pglock": "tests.sample.later_version"}
