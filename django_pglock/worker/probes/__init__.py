"""Probes: how people, orchestrators and service managers learn whether a worker lives and works."""
