"""``otel-train`` and ``python -m otel_train``: the command line."""

import sys


def main() -> int:
    """Runs one command; returns the exit code. Ctrl-C, also during imports, ends it without a traceback."""
    try:
        from otel_train.cli.main import main as command

        return command()
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # in __set_name__, before Python 3.12
            return 130
        raise


if __name__ == "__main__":
    sys.exit(main())
