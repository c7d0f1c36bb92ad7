"""What sessions of an environment consist of: clients, tools, the processes that they live in, and what runs them."""
