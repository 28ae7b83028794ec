"""One frozen object that says how a run is observed."""

from __future__ import annotations

import logging
import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_train.config.validation import (
    FILE_VARIABLE,
    MIB,
    PREFIX,
    RESERVED,
    SECRETS,
    IgnoredSetting,
    check,
    parsed,
    text_of,
    typed,
    unknown,
)
from otel_train.errors import ConfigError
from otel_train.fast_dataclass import fast_dataclass
from otel_train.safety import PrintableRecords

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CODE, ENVIRONMENT = "code", "environment"
"""What ``ResolvedConfig.origins`` says of settings that no file has; else it has the path of the file."""

_log = logging.getLogger("otel_train")
_log.addFilter(PrintableRecords())

_warned: set[str] = set()

_MOST_CHARS: Final = 200
"""Of the name of a variable, as a mistake in it is told."""


@fast_dataclass(frozen=True, kw_only=True)
class Config:
    """How a run is observed. Keyword settings win over a Config, that over the environment, that over files.

    Standard ``OTEL_*`` variables (endpoint, headers, protocol, service name) keep their meaning and are
    not repeated here.

    Raises:
        ConfigError: a value cannot be honoured; the message has value, rule and remedy.
    """

    disabled: bool = False
    """Do nothing at all: no hook, no thread, no file."""

    run_id: str = ""
    """Id of the run, the same on all ranks and after restarts. Empty: detected or made. No control characters."""

    run_name: str = ""
    """A name for people. Empty: the run id. No control characters."""

    run_dir: str = "runs"
    """Folder that holds one run directory per run. Made when missing."""

    attempt: int = -1
    """Which start of the run this is, from 0. -1: detected."""

    prometheus: bool = True
    """Serve ``/metrics``."""

    prometheus_host: str = "127.0.0.1"
    """Address ``/metrics`` listens on. Anything but loopback shows the run to the network."""

    prometheus_port: int = 9464
    """Port of ``/metrics``, 0 to 65535; the next free one if taken. 0: any free port."""

    otlp: str = "auto"
    """Send by OTLP: ``auto`` (when an ``OTEL_EXPORTER_OTLP*_ENDPOINT`` is set), ``on`` or ``off``."""

    export_every_s: float = 15.0
    """Seconds between exports of metrics, 0.1 to 3600. Alert rules assume at most 60."""

    agent: str = "process"
    """Where everything but recording is done: ``process`` (an agent beside the program; a thread of it where none can be
    started), ``thread`` (of the program, for places that forbid a process) or ``off`` (nothing is recorded)."""

    turn_every_s: float = 0.5
    """Seconds between two looks of the pump at what was recorded, 0.01 to 10."""

    log_every_steps: int = 0
    """Training steps between two rows for trackers, and between two lines of progress on the console. 0: 50 for
    trackers, and no lines."""

    log_every_epochs: int = 1
    """Epochs between two rows of throughput for trackers. 0: none."""

    console: bool = True
    """Print the card at the end, on rank 0."""

    flight: bool = True
    """Map the flight file, so that the last steps survive a crash. False: plain memory."""

    flight_edges: int = 1 << 18
    """Edges a thread's ring holds; two per stage. A power of two from 4096 to 16777216."""

    keep_warmup_steps: int = 5
    """First steps whose trace is kept. 0 or more."""

    keep_every_steps: int = 0
    """Keep the trace of every so many steps as a baseline. 0: chosen from the step rate."""

    keep_slow_factor: float = 2.0
    """Keep the trace of a step this many times slower than the run's median. More than 1."""

    keep_per_s: float = 2.0
    """Traces kept per second, on average. More than 0."""

    keep_burst: int = 20
    """Traces kept at once before ``keep_per_s`` limits them. 1 or more."""

    stall_after_s: float = 300.0
    """Seconds without progress that count as a stall, at least; 20 median steps if that is longer. More than 0."""

    digest_every_s: float = 5.0
    """Seconds between two records that a rank leaves for the others, 0 to 3600; 0 for none. Longer above 1000 ranks."""

    max_loaders: int = 16
    """Loader names in metrics, 1 to 64; further ones become ``_OTHER``."""

    max_stages: int = 8
    """Stage names of your own in metrics, 0 to 32; further ones become ``_OTHER``."""

    exit_timeout_s: float = 1.5
    """Seconds that sending may delay the end of the program, 0 to 60. What is left waits in the spool."""

    total_steps: int = 0
    """Steps planned, for progress. 0: unknown."""

    checkpoint_every_s: float = 0.0
    """Seconds between checkpoints, for the alert on missing ones. 0: learned from the run."""

    flops_per_sample: float = 0.0
    """Model FLOPs of one training sample, forward and backward. 0: unknown."""

    device_flops: float = 0.0
    """Peak dense FLOP/s of one device at the dtype of training. 0: BF16 of the data sheet, for devices that are known."""

    flops: str = "given"
    """Where the model FLOPs come from: `given` by `flops_per_sample`; `auto`: where that is 0, one step of the run is counted."""

    summary_every_s: float = 30.0
    """Seconds between rewrites of ``summary.json``. 1 or more."""

    max_run_dir_bytes: int = 256 * MIB
    """Bytes one rank's part of the run directory may take, flight file included. At least 16 MiB."""

    cuda_timing: str = "events"
    """Device time: ``events`` (read later), ``sync`` (waits at stage edges: exact, slow) or ``off``."""

    hardware: str = "auto"
    """Utilisation, power and temperature of GPUs by NVML: ``auto`` (where no DCGM exporter answers), ``on``, ``off``."""

    dcgm_endpoint: str = "127.0.0.1:9400"
    """Where a DCGM exporter would answer, as host:port. Asked once, for a quarter of a second."""

    capture: str = "asked"
    """Profiler captures: ``asked`` (by the program, ``otel-train profile``, HTTP, SIGUSR2, an alert, the schedule
    below), ``auto`` (and when steps become slow) or ``off``."""

    alertmanager_url: str = ""
    """Address of an Alertmanager, such as ``http://alertmanager:9093``. Every 15 s each rank asks it for firing alerts of
    its own that carry the label ``capture="true"``, and captures. Empty: no alert captures."""

    alertmanager_headers: str = ""
    """Headers of those questions, ``name=value`` with commas between, values percent-encoded, as in
    ``OTEL_EXPORTER_OTLP_HEADERS``."""

    capture_steps: int = 5
    """Steps per capture, 1 to 10000. The end of one costs training 15 ms for every MB of trace."""

    capture_warmup: int = 1
    """Steps before those, in which the profiler runs and its output is thrown away."""

    capture_wait: int = 0
    """Steps to let pass before that."""

    capture_every_steps: int = 0
    """Capture every so many steps, the same ones on every rank. 0: never."""

    capture_every_epochs: int = 0
    """Capture the first steps of every so many passes over the training data. 0: never."""

    capture_epochs: str = ""
    """Capture the first steps of these passes over the training data, counted from 1: ``1,3``. Empty: of none."""

    capture_every_min: float = 0.0
    """Capture every so many minutes. 0: never."""

    capture_skip_first: int = 10
    """No capture by schedule before this step."""

    capture_repeat: int = 0
    """Most captures by schedule. 0: any number."""

    capture_activities: str = "cpu,cuda"
    """What to record, of ``cpu``, ``cuda``, ``xpu``, ``mtia``; what a machine lacks is left out and said."""

    capture_shapes: bool = False
    """Record the shapes of operations' inputs."""

    capture_stacks: bool = False
    """Record where operations were called: 20 to 30 % slower while it lasts."""

    capture_memory: bool = False
    """Record every allocation."""

    capture_flops: bool = False
    """Record floating point operations where they are known."""

    capture_cooldown_s: float = 600.0
    """Least seconds between two captures of one cause that nobody asked for: slow steps, or an alert of one name."""

    capture_max_s: float = 60.0
    """Longest capture, in seconds. More than 0."""

    capture_max_bytes: int = 64 * MIB
    """Largest file kept. Once a capture has shown what a step takes, no more steps are captured than fit."""

    capture_kept: int = 8
    """Captures kept per rank; the oldest that is not pinned goes first. 1 or more."""

    capture_token: str = ""
    """Opens ``POST /capture``. Empty: made, and written to ``capture-token`` in the folder of the rank."""

    capture_tensorboard: str = ""
    """Folder for TensorBoard's profiler plugin. Empty: none."""

    capture_output_dir: str = ""
    """Folder that gets each trace as plain ``epoch_N.json`` as well; nothing is removed from it. Empty: none."""

    capture_top: int = 5
    """Operators and kernels shown on the console after a capture, below what was found, 0 to 100. 0: nothing."""

    artifacts: bool = False
    """Write the run's artifacts when it ends, into ``artifacts`` of the run directory; rank 0 does. After a crash,
    ``otel-train run`` writes them; ``otel-train artifacts`` does at any time."""

    export_profile: str = "auto"
    """Which ranks export how much: ``full`` (all), ``lean`` (all, few series), ``digest`` (rank 0 for all; traces of one
    rank per node) or ``rank0`` (rank 0 alone). ``auto``: by the number of ranks, up to 64, up to 2048, above."""

    tensor_parallel: int = 1
    """Ranks in a row that work on the same samples: the tensor parallel size times the context parallel one. One of them
    counts the samples. Needed only where the process groups do not tell, by a ``DeviceMesh`` or Megatron."""

    pipeline_parallel: int = 1
    """Pipeline stages that the ranks are divided into, in order; the ranks of the first count the samples."""

    wandb: str = "auto"
    """Log to W&B, on rank 0: ``auto`` (beside what the program logs, to the run that it opens; none is opened), ``on``
    (a run of our own) or ``off``. In code also True, False, a run, or a dict of what ``wandb.init`` takes."""

    mlflow: str = "auto"
    """Log to MLflow, on rank 0: ``auto`` (to the run that the program opens; none is opened), ``on`` (a run of our own)
    or ``off``. In code also True, False, a run, or a dict of ``tracking_uri``, ``experiment_name``, ``run_name``."""

    tensorboard: str = "auto"
    """Write event files for TensorBoard, on rank 0, into ``tensorboard`` in the run directory: ``auto`` (once the program
    itself has imported TensorBoard), ``on`` or ``off``. In code also True, False, a ``SummaryWriter``, or a dict with
    ``log_dir``."""

    exporters: str = "auto"
    """Exporters of other packages (entry points ``otel_train.exporters``): ``auto`` (every one that is installed),
    ``off``, or some by name, divided by commas; in code also a list."""

    console_blocks: str = ""
    """What to print on standard error, on rank 0, some of ``profiling`` (operations, every ``log_every_steps``) and
    ``throughput`` (every ``log_every_epochs``), divided by commas; in code also a list. Empty: nothing."""

    throughput_parts: str = "timing,memory"
    """What the throughput of an epoch has beside rates and efficiency: some of ``timing`` (times to load and to
    transform a batch) and ``memory``, divided by commas, or ``none``; in code also a list."""

    def __post_init__(self) -> None:
        """Refuse values we cannot honour, while the user is still looking."""
        values: dict[str, object] = {}
        for field in fields(self):
            values[field.name] = typed(field.name, getattr(self, field.name), field.default)
            object.__setattr__(self, field.name, values[field.name])
        check(values, DEFAULTS)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """Read ``OTEL_TRAIN_FLIGHT_EDGES`` and so on. An empty value counts as not set.

        A value that does not fit, and a name with our prefix that is not a setting, is warned of and ignored.
        """
        values, ignored = settings_in(environ)
        config = cls(**values)
        warn(in_force(ignored, config))
        return config

    def to_env(self) -> dict[str, str]:
        """The settings that differ from their default, as environment variables.

        ``Config.from_env(config.to_env()) == config``.
        """
        return {PREFIX + name.upper(): text_of(value) for name, value in changed(self).items()}


DEFAULTS: Final[dict[str, Any]] = {field.name: field.default for field in fields(Config)}
"""Every setting and the value it has when nobody says anything."""


class Origins(dict[str, str]):
    """Where each setting that somebody has given comes from, by name.

    Attributes:
        ignored: what an environment or a file gives and is not honoured.
    """

    ignored: tuple[IgnoredSetting, ...] = ()


class ResolvedConfig(NamedTuple):
    """What holds for a run.

    Attributes:
        config: the settings.
        origins: where each setting that somebody has given comes from, by name, and what is ignored.
        given: trackers that a file describes by a table, by the name of their setting.
    """

    config: Config
    origins: Origins
    given: Mapping[str, Mapping[str, Any]]


def changed(config: Config) -> dict[str, Any]:
    """The settings that differ from their default."""
    values = {name: getattr(config, name) for name in DEFAULTS}
    return {name: value for name, value in values.items() if value != DEFAULTS[name]}


def settings_in(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[IgnoredSetting]]:
    """The settings that an environment holds, and what in it cannot be honoured."""
    names = {PREFIX + name.upper(): name for name in DEFAULTS}
    values: dict[str, Any] = {}
    ignored: list[IgnoredSetting] = []
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in RESERVED or not text:
            continue
        name = names.get(variable)
        if name is None:
            problem = unknown(variable[:_MOST_CHARS], (*names, FILE_VARIABLE))
            ignored.append(IgnoredSetting(variable[:_MOST_CHARS], ENVIRONMENT, problem))
            continue
        try:
            values[name] = read_value(name, variable, text)
        except ConfigError as error:
            ignored.append(IgnoredSetting(variable, ENVIRONMENT, str(error)))
    return values, ignored


def read_value(name: str, variable: str, text: str) -> Any:  # Any: of the type of the setting
    """The value of a setting that is given as text.

    Args:
        name: of the setting.
        variable: what whoever gave it calls it.
        text: the value.

    Raises:
        ConfigError: it does not fit.
    """
    value: Any = parsed(variable, text, DEFAULTS[name])
    try:
        return getattr(Config(**{name: value}), name)
    except ConfigError as error:
        raise ConfigError(variable + str(error).removeprefix(name)) from None


def in_force(ignored: Iterable[IgnoredSetting], config: Config) -> tuple[IgnoredSetting, ...]:
    """The same, each with what holds in its place."""
    return tuple(
        each._replace(used=_used(each.name.removeprefix(PREFIX).lower(), config)) for each in ignored
    )


def _used(name: str, config: Config) -> str:
    return f"{name}={getattr(config, name)!r}" if name in DEFAULTS and name not in SECRETS else ""


def warn(ignored: Iterable[IgnoredSetting]) -> None:
    """Log each setting that is ignored, once per process."""
    for each in ignored:
        if each.problem not in _warned:
            _warned.add(each.problem)
            _log.warning("settings: %s", each)
