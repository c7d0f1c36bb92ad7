"""The suites of the bench: each yields rows, and knows nothing of how they are printed or stored."""
