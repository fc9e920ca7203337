"""The layout `segments`: slots of preallocated files, one writer."""
