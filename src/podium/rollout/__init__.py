"""From prompts to completions: loading and encoding prompts, sampling, and the engines that generate."""
