"""Liveness: the heartbeat of this worker, and deadlines for connections that no longer answer."""
