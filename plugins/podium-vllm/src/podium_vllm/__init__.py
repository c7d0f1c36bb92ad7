"""The engine ``vllm``: vLLM's scheduler and model, in the process of the generator."""
