"""`python -m bpipe`."""

import sys

from bpipe.tools.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
