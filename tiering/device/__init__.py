"""Copies between device memory and the host tier."""
