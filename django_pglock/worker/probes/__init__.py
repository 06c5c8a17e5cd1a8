"""Probes: tell people, orchestrators and service managers whether a worker lives and works."""
