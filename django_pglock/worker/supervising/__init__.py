"""Supervising: several worker processes under one supervisor, and when a process is replaced."""
