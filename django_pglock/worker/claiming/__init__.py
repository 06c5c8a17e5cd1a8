"""Claiming: which tasks this process asks the database for, when, and in which order."""
