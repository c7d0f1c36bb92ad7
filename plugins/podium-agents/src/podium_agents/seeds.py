"""Seeds that follow from other seeds, and share no draw with them."""

import hashlib

__all__ = ["hash_seed"]


def hash_seed(seed: int, name: str) -> int:
    """Return another seed, which follows from ``seed`` and ``name``."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest(), "big")
