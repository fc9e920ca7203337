"""Awaitable backends that hold chunks, and the shared memory of the host tier."""
