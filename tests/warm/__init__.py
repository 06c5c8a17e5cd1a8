"""Processes that start quickly: they are forked from a parent in which Django is set up already."""
