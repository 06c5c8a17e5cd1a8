"""Claiming: which tasks this process claims, when, and in which order."""
