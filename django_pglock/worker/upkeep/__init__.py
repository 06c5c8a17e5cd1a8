"""Upkeep: regular work for the whole database, which one worker at a time does."""
