"""``python -m otel_train``: the command line."""

import sys

from otel_train.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
