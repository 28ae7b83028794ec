"""Everything otel_train raises on purpose.

    OtelTrainError
    |-- ConfigError         a setting has a value we cannot honour
    |-- MissingExtraError   a feature was asked for whose package is not installed
    |-- RunDirectoryError   a run directory is not what it claims to be
    |-- TraceError          a profiler trace is not what it claims to be
    |-- ComparisonError     two recordings cannot be compared
    `-- StackError          the stack, or a part of it, cannot be started or reached

Set-up and offline commands raise these. A running training loop never sees them.
"""


class OtelTrainError(Exception):
    """Base of every error that otel_train raises on purpose."""


class ConfigError(OtelTrainError, ValueError):
    """A setting has a value we cannot honour; the message says value, rule and remedy."""


class MissingExtraError(OtelTrainError, ImportError):
    """A feature was asked for whose package is not installed; the message says how to install it."""


class RunDirectoryError(OtelTrainError):
    """A run directory, or a file in it, is missing or is not what it claims to be."""


class TraceError(OtelTrainError):
    """A profiler trace cannot be read, or traces of ranks do not belong together; the message says why."""


class ComparisonError(OtelTrainError):
    """Two traces or two runs cannot be compared; the message says why."""


class StackError(OtelTrainError):
    """The stack, or a part of it, cannot be started or reached; the message says what to do."""
