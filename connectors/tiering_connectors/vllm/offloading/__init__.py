"""The second door: an OffloadingSpec for vLLM's own OffloadingConnector, over the same engine."""
