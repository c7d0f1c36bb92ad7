"""The three schedules on a model of a million parameters: the same held-out accuracy, over several seeds."""
