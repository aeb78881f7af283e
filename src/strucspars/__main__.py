"""`strucspars`, and `python -m strucspars`."""

import logging
import os
import sys


def main() -> int:
    """Run the command line, or say how to install it."""
    try:
        from strucspars.cli.main import main as command_line
    except ModuleNotFoundError as error:
        from strucspars.cli import missing_extra

        remedy = missing_extra(error)
        if remedy is None:
            raise
        print(f"error: {remedy}", file=sys.stderr)
        return 2
    return command_line()


# Worker processes import this file again.
if __name__ == "__main__":
    status = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Threads of torch.distributed may outlive the interpreter and abort the process, whose status would be lost.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
