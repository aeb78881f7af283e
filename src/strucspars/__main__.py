"""`python -m strucspars`."""

import sys

from strucspars.cli.app import main

# Worker processes import this file again.
if __name__ == "__main__":
    sys.exit(main())
