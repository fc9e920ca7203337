"""Inner loops over plain arrays. Imports nothing else of ours."""
