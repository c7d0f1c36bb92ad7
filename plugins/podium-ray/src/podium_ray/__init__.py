"""The backend ``ray``: one Ray actor a rank, on this machine or on a cluster."""

from podium_ray.backend import RayBackend

__all__ = ["RayBackend"]
