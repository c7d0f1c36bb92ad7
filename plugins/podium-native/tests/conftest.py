"""Fixtures that the tests of all engines have."""

from tests.unit.rollout.engines.conftest import make_model, prompts

__all__ = ["make_model", "prompts"]
