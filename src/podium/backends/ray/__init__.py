"""The backend ``ray``: one Ray actor a rank, on this machine or on a cluster. Needs ``pip install ray``."""

from podium.backends.ray.backend import RayBackend

__all__ = ["RayBackend"]
