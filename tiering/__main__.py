"""`python -m tiering`: the command `tiering`."""

import sys

from tiering.cli import main

if __name__ == "__main__":
    sys.exit(main())
