"""The tiers' loop in a process of its own: the engine's end, the child, and what crosses."""
