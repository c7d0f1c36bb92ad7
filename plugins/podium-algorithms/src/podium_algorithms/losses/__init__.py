"""Losses of single papers, each in a module of its own."""
