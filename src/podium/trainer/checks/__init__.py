"""What is checked, and what is told, before a run starts. Nothing here starts a worker or loads weights."""
