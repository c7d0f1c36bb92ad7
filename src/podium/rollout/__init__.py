"""From prompts to completions: data and chat formatting, sampling, and the engines that generate."""
