"""Chunks as objects in a bucket."""
