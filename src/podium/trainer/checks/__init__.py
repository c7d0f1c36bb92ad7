"""Checks and plans of a run before it starts. Nothing here starts a worker or loads weights."""
