"""The `muster` command, also as `python -m muster`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; Ctrl-C while it is still being imported ends it as quietly as later."""
    try:
        from muster.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
