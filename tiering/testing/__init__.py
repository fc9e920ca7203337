"""For authors of backends: the conformance suite and tools for tests. Needs pytest."""
