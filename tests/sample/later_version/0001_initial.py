"""The first migration, as it is."""

from importlib import import_module

Migration = import_module("django_pglock.migrations.0001_initial").Migration
