"""The adapter for vLLM: scheduler half and worker half of one connector."""
