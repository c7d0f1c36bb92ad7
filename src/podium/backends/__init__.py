"""Places where hosts run: each package here implements podium.runtime.backend and nothing more."""
