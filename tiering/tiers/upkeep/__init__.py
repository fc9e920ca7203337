"""Looking after what lies under a root, without an engine: survey, scrub, collect."""
