"""The three schedules on a model of 0.8 million parameters: the same held-out accuracy, over several seeds."""
