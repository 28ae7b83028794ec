"""How a launcher and the processes below it find each other: an environment variable, and what lies in a folder."""

from typing import Final

FOLDER: Final = "OTEL_TRAIN_LAUNCH"
"""A private folder of the launcher, gone when it ends."""
