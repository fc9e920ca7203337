"""The exit codes of the command `tiering`, which scripts rely on."""

OK, FAILED, INVALID, DAMAGED, DIFFERENT, INTERRUPTED = 0, 1, 2, 3, 4, 130

TOLD = """\
exit codes:
  0    done; for config: the configuration is valid; for verify: all is good; for events
       --check: what was announced is what is there
  1    failed: a file or directory that is not there or cannot be read, nobody who publishes,
       an address that cannot be bound
  2    the configuration is invalid, or the command line is
  3    verify has found damage
  4    events --check has found a difference
  130  interrupted
"""
