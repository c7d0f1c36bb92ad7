"""Podium: reinforcement-learning post-training of language models from one ordinary Python script."""
