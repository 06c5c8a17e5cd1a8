"""The demo: the main job on real input, with a worker killed in the middle, and evidence from the database."""
