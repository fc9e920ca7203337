"""Adapters of the engine to LLM servers."""
