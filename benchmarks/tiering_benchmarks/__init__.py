"""The harness: a real server to measure, tiny models to serve, the demo."""
