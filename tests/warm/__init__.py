"""Processes that start in a moment: forked from a parent in which Django is set up already."""
