"""Places where worker processes run: each package here implements podium.runtime.backend and nothing more."""
