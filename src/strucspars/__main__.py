"""`python -m strucspars`."""

import logging
import os
import sys

from strucspars.cli.main import main

# Worker processes import this file again.
if __name__ == "__main__":
    status = main()
    # Not by the engine, whose libraries take seconds to import: --help needs none of them.
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Threads of torch.distributed may outlive the interpreter and abort the process, whose status would be lost.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
