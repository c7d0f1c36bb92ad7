"""Whether each preset and each recipe learns: five seeds of a small task, and TRL's GRPO beside them."""
