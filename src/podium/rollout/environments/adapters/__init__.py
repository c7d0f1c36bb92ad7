"""Environments of other projects, each in a module of its own, which imports the project when it is used."""
