"""Connections of this machine that a server accepts: how many, for how long, and of which user."""
