"""The exit codes of the command `tiering`, which scripts rely on."""

OK, FAILED, INVALID, DAMAGED, INTERRUPTED = 0, 1, 2, 3, 130

TOLD = """\
exit codes:
  0    done; for config: the configuration is valid; for verify: all is good
  1    failed: a file or directory that is not there or cannot be read
  2    the configuration is invalid, or the command line is
  3    verify has found damage
  130  interrupted
"""
