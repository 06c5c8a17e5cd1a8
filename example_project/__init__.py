"""A small shop on django_pglock: the demo, and the project in which the tests run."""
