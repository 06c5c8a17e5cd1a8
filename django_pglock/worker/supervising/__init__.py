"""Supervising: one supervisor runs several worker processes, and replaces them."""
