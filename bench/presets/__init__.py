"""Whether each preset and each recipe learns: five seeds of a small task from the same model, and TRL's GRPO beside them."""
