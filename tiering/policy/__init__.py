"""Eviction policies: pure orders over keys, one file each."""
