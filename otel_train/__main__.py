"""``otel-train`` and ``python -m otel_train``: the command line."""

import sys


def main() -> int:
    """Runs one command; returns the exit code. Ctrl-C, also during imports, ends it without a traceback."""
    try:
        from otel_train.cli.main import main as command

        return command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
