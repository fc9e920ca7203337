"""How rows move from another engine's host tier into this one's: see `base`."""
