"""Liveness: the heartbeat of this worker, and giving up on connections that no longer answer."""
