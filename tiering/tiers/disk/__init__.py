"""What both layouts of an fs tier share: file system calls, threads, names, recency."""
