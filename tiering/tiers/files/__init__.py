"""The layout `files`: one file for each chunk, shared, bounded by a manifest."""
