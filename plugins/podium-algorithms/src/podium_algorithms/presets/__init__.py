"""The settings of papers whose functions this package has, each in a YAML file beside this module."""
