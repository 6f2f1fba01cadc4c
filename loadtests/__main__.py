"""`python -m loadtests COMMAND`: the load tool (loadtests/load/cli.py)."""

from __future__ import annotations

import sys

from loadtests.load.cli import main

if __name__ == "__main__":
    sys.exit(main())
