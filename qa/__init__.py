"""Tests that need other programs, many processes or hours. Each folder is an environment of tox."""
