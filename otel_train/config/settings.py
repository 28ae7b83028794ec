"""One frozen object that says how a run is observed."""

from __future__ import annotations

import logging
import os
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from otel_train.config.validation import (
    FILE_VARIABLE,
    MIB,
    PREFIX,
    RESERVED,
    Between,
    EpochNumbers,
    HttpUrl,
    IgnoredSetting,
    MoreThan,
    NameList,
    OneOf,
    Plain,
    PowerOfTwo,
    Setting,
    SomeOf,
    TrackerChoice,
    ValueRule,
    text_of,
    unknown,
)  # fmt: skip
from otel_train.errors import ConfigError
from otel_train.fast_dataclass import fast_dataclass
from otel_train.safety import PrintableRecords

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CODE, ENVIRONMENT = "code", "environment"
"""What ``ResolvedConfig.origins`` says of settings that no file has; else it has the path of the file."""

ACTIVITIES: Final = ("cpu", "cuda", "xpu", "mtia")
"""What torch.profiler can record."""

BLOCKS: Final = ("profiling", "throughput", "profiler")
"""What can be printed on the console while training runs."""

MOST_TOP: Final = 100
"""Operators and kernels that can be shown after a capture."""

_log = logging.getLogger("otel_train")
_log.addFilter(PrintableRecords())

_warned: set[str] = set()

_MOST_CHARS: Final = 200
"""Of the name of a variable, as a mistake in it is told."""

T = TypeVar("T", bool, int, float, str)


def setting(*, default: T, rule: ValueRule = ValueRule(), secret: bool = False) -> T:  # noqa: B008 - a rule has no state
    """A field of ``Config``. Its docstring is the row of the setting in the reference.

    Args:
        default: the value where none is given.
        rule: what the value may be, beside its type.
        secret: whether the value is shown nowhere.
    """
    made: T = field(default=default, metadata={"rule": rule, "secret": secret})
    return made


@fast_dataclass(frozen=True, kw_only=True)
class Config:
    """How a run is observed. Keyword settings win over a Config, that over the environment, that over files.

    Standard ``OTEL_*`` variables (endpoint, headers, protocol, service name) keep their meaning and are
    not repeated here.

    Raises:
        ConfigError: a value cannot be honoured; the message has value, rule and remedy.
    """

    disabled: bool = setting(default=False)
    """Do nothing at all: no hook, no thread, no file."""

    run_id: str = setting(default="", rule=Plain())
    """Id of the run, the same on all ranks and after restarts. Empty: detected or made. No control characters."""

    run_name: str = setting(default="", rule=Plain())
    """A name for people. Empty: the run id. No control characters."""

    run_dir: str = setting(default="runs", rule=Plain(filled=True))
    """Folder that holds one run directory per run. Made when missing."""

    attempt: int = setting(default=-1, rule=Between(-1, 1 << 31))
    """Which start of the run this is, from 0. -1: detected."""

    prometheus: bool = setting(default=True)
    """Serve ``/metrics``."""

    prometheus_host: str = setting(default="127.0.0.1", rule=Plain(filled=True))
    """Address ``/metrics`` listens on. Anything but loopback shows the run to the network."""

    prometheus_port: int = setting(default=9464, rule=Between(0, 65535))
    """Port of ``/metrics``, 0 to 65535; the next free one if taken. 0: any free port."""

    otlp: str = setting(default="auto", rule=OneOf("auto", "on", "off"))
    """Send by OTLP: ``auto`` (when an ``OTEL_EXPORTER_OTLP*_ENDPOINT`` is set), ``on`` or ``off``."""

    export_every_s: float = setting(default=15.0, rule=Between(0.1, 3600))
    """Seconds between exports of metrics, 0.1 to 3600. Alert rules assume at most 60."""

    agent: str = setting(default="process", rule=OneOf("process", "thread", "off"))
    """Where everything but recording is done: ``process`` (an agent beside the program; a thread of it where none can be
    started), ``thread`` (of the program, for places that forbid a process) or ``off`` (nothing is recorded)."""

    turn_every_s: float = setting(default=0.5, rule=Between(0.01, 10))
    """Seconds between two looks of the pump at what was recorded, 0.01 to 10."""

    log_every_steps: int = setting(default=0, rule=Between(0))
    """Training steps between two rows for trackers, and between two lines of progress on the console. 0: 50 for
    trackers, and no lines."""

    log_every_epochs: int = setting(default=1, rule=Between(0))
    """Epochs between two rows of throughput for trackers. 0: none."""

    console: bool = setting(default=True)
    """Print the card at the end, on rank 0."""

    flight: bool = setting(default=True)
    """Map the flight file, so that the last steps survive a crash. False: plain memory."""

    flight_edges: int = setting(default=1 << 18, rule=PowerOfTwo(1 << 12, 1 << 24))
    """Edges a thread's ring holds; two per stage. A power of two from 4096 to 16777216."""

    keep_warmup_steps: int = setting(default=5, rule=Between(0))
    """First steps whose trace is kept. 0 or more."""

    keep_every_steps: int = setting(default=0, rule=Between(0))
    """Keep the trace of every so many steps as a baseline. 0: chosen from the step rate."""

    keep_slow_factor: float = setting(default=2.0, rule=MoreThan(1))
    """Keep the trace of a step this many times slower than the run's median. More than 1."""

    keep_per_s: float = setting(default=2.0, rule=MoreThan(0))
    """Traces kept per second, on average. More than 0."""

    keep_burst: int = setting(default=20, rule=Between(1))
    """Traces kept at once before ``keep_per_s`` limits them. 1 or more."""

    stall_after_s: float = setting(default=300.0, rule=MoreThan(0))
    """Seconds without progress that count as a stall, at least; 20 median steps if that is longer. More than 0."""

    digest_every_s: float = setting(default=5.0, rule=Between(0, 3600))
    """Seconds between two records that a rank leaves for the others, 0 to 3600; 0 for none. Longer above 1000 ranks."""

    max_loaders: int = setting(default=16, rule=Between(1, 64))
    """Loader names in metrics, 1 to 64; further ones become ``_OTHER``."""

    max_stages: int = setting(default=8, rule=Between(0, 32))
    """Stage names of your own in metrics, 0 to 32; further ones become ``_OTHER``."""

    exit_timeout_s: float = setting(default=1.5, rule=Between(0, 60))
    """Seconds that sending may delay the end of the program, 0 to 60. What is left waits in the spool."""

    total_steps: int = setting(default=0, rule=Between(0))
    """Steps planned, for progress. 0: unknown."""

    checkpoint_every_s: float = setting(default=0.0, rule=Between(0, 1e9))
    """Seconds between checkpoints, for the alert on missing ones. 0: learned from the run."""

    flops_per_sample: float = setting(default=0.0, rule=Between(0, 1e30))
    """Model FLOPs of one training sample, forward and backward. 0: unknown."""

    device_flops: float = setting(default=0.0, rule=Between(0, 1e30))
    """Peak dense FLOP/s of one device at the dtype of training. 0: BF16 of the data sheet, for devices that are known."""

    flops: str = setting(default="given", rule=OneOf("given", "auto"))
    """Where the model FLOPs come from: `given` by `flops_per_sample`; `auto`: where that is 0, one step of the run is counted."""

    summary_every_s: float = setting(default=30.0, rule=Between(1, 1e9))
    """Seconds between rewrites of ``summary.json``. 1 or more."""

    max_run_dir_bytes: int = setting(default=256 * MIB, rule=Between(16 * MIB))
    """Bytes one rank's part of the run directory may take, flight file included. At least 16 MiB."""

    cuda_timing: str = setting(default="events", rule=OneOf("events", "sync", "off"))
    """Device time: ``events`` (read later), ``sync`` (waits at stage edges: exact, slow) or ``off``."""

    hardware: str = setting(default="auto", rule=OneOf("auto", "on", "off"))
    """Utilisation, power and temperature of GPUs by NVML: ``auto`` (where no DCGM exporter answers), ``on``, ``off``."""

    dcgm_endpoint: str = setting(default="127.0.0.1:9400", rule=Plain(filled=True))
    """Where a DCGM exporter would answer, as host:port. Asked once, for a quarter of a second."""

    capture: str = setting(default="asked", rule=OneOf("asked", "auto", "off"))
    """Profiler captures: ``asked`` (by the program, ``otel-train profile``, HTTP, SIGUSR2, an alert, the schedule
    below), ``auto`` (and when steps become slow) or ``off``."""

    alertmanager_url: str = setting(default="", rule=HttpUrl(), secret=True)
    """Address of an Alertmanager, such as ``http://alertmanager:9093``. Every 15 s each rank asks it for firing alerts of
    its own that carry the label ``capture="true"``, and captures. Empty: no alert captures."""

    alertmanager_headers: str = setting(default="", rule=Plain(), secret=True)
    """Headers of those questions, ``name=value`` with commas between, values percent-encoded, as in
    ``OTEL_EXPORTER_OTLP_HEADERS``."""

    capture_steps: int = setting(default=5, rule=Between(1, 10_000))
    """Steps per capture, 1 to 10000. The end of one costs training 15 ms for every MB of trace."""

    capture_warmup: int = setting(default=1, rule=Between(0, 10_000))
    """Steps before those, in which the profiler runs and its output is thrown away."""

    capture_wait: int = setting(default=0, rule=Between(0, 10_000))
    """Steps to let pass before that."""

    capture_every_steps: int = setting(default=0, rule=Between(0))
    """Capture every so many steps, the same ones on every rank. 0: never."""

    capture_every_epochs: int = setting(default=0, rule=Between(0))
    """Capture the first steps of every so many passes over the training data. 0: never."""

    capture_epochs: str = setting(default="", rule=EpochNumbers())
    """Capture the first steps of these passes over the training data, counted from 1: ``1,3``. Empty: of none."""

    capture_every_min: float = setting(default=0.0, rule=Between(0, 1e9))
    """Capture every so many minutes. 0: never."""

    capture_skip_first: int = setting(default=10, rule=Between(0))
    """No capture by schedule before this step."""

    capture_repeat: int = setting(default=0, rule=Between(0))
    """Most captures by schedule. 0: any number."""

    capture_activities: str = setting(default="cpu,cuda", rule=SomeOf(*ACTIVITIES))
    """What to record, of ``cpu``, ``cuda``, ``xpu``, ``mtia``; what a machine lacks is left out and said."""

    capture_shapes: bool = setting(default=False)
    """Record the shapes of operations' inputs."""

    capture_stacks: bool = setting(default=False)
    """Record where operations were called: 20 to 30 % slower while it lasts."""

    capture_memory: bool = setting(default=False)
    """Record every allocation."""

    capture_flops: bool = setting(default=False)
    """Record floating point operations where they are known."""

    capture_cooldown_s: float = setting(default=600.0, rule=Between(0, 1e9))
    """Least seconds between two captures of one cause that nobody asked for: slow steps, or an alert of one name."""

    capture_max_s: float = setting(default=60.0, rule=MoreThan(0))
    """Longest capture, in seconds. More than 0."""

    capture_max_bytes: int = setting(default=64 * MIB, rule=Between(1))
    """Largest file kept. Once a capture has shown what a step takes, no more steps are captured than fit."""

    capture_kept: int = setting(default=8, rule=Between(1))
    """Captures kept per rank; the oldest that is not pinned goes first. 1 or more."""

    capture_token: str = setting(default="", rule=Plain(), secret=True)
    """Opens ``POST /capture``. Empty: made, and written to ``capture-token`` in the folder of the rank."""

    capture_tensorboard: str = setting(default="", rule=Plain())
    """Folder for TensorBoard's profiler plugin. Empty: none."""

    capture_output_dir: str = setting(default="", rule=Plain())
    """Folder that gets each trace as plain ``epoch_N.json`` as well; nothing is removed from it. Empty: none."""

    capture_top: int = setting(default=5, rule=Between(0, MOST_TOP))
    """Operators and kernels shown on the console after a capture, below what was found, 0 to 100. 0: nothing."""

    artifacts: bool = setting(default=False)
    """Write the run's artifacts when it ends, into ``artifacts`` of the run directory; rank 0 does. After a crash,
    ``otel-train run`` writes them; ``otel-train artifacts`` does at any time."""

    export_profile: str = setting(default="auto", rule=OneOf("auto", "full", "lean", "digest", "rank0"))
    """Which ranks export how much: ``full`` (all), ``lean`` (all, few series), ``digest`` (rank 0 for all; traces of one
    rank per node) or ``rank0`` (rank 0 alone). ``auto``: by the number of ranks, up to 64, up to 2048, above."""

    tensor_parallel: int = setting(default=1, rule=Between(1, 1 << 31))
    """Ranks in a row that work on the same samples: the tensor parallel size times the context parallel one. One of them
    counts the samples. Needed only where the process groups do not tell, by a ``DeviceMesh`` or Megatron."""

    pipeline_parallel: int = setting(default=1, rule=Between(1, 1 << 31))
    """Pipeline stages that the ranks are divided into, in order; the ranks of the first count the samples."""

    wandb: str = setting(default="auto", rule=TrackerChoice())
    """Log to W&B, on rank 0: ``auto`` (beside what the program logs, to the run that it opens; none is opened), ``on``
    (a run of our own) or ``off``. In code also True, False, a run, or a dict of what ``wandb.init`` takes."""

    mlflow: str = setting(default="auto", rule=TrackerChoice())
    """Log to MLflow, on rank 0: ``auto`` (to the run that the program opens; none is opened), ``on`` (a run of our own)
    or ``off``. In code also True, False, a run, or a dict of ``tracking_uri``, ``experiment_name``, ``run_name``."""

    tensorboard: str = setting(default="auto", rule=TrackerChoice())
    """Write event files for TensorBoard, on rank 0, into ``tensorboard`` in the run directory: ``auto`` (once the program
    itself has imported TensorBoard), ``on`` or ``off``. In code also True, False, a ``SummaryWriter``, or a dict with
    ``log_dir``."""

    exporters: str = setting(default="auto", rule=NameList(filled=True))
    """Exporters of other packages (entry points ``otel_train.exporters``): ``auto`` (every one that is installed),
    ``off``, or some by name, divided by commas; in code also a list."""

    console_blocks: str = setting(default="", rule=SomeOf("", *BLOCKS))
    """What to print on standard error, on rank 0, some of ``profiling`` (operations, every ``log_every_steps``) and
    ``throughput`` (every ``log_every_epochs``), divided by commas; in code also a list. Empty: nothing."""

    throughput_parts: str = setting(default="timing,memory", rule=SomeOf("timing", "memory", "none"))
    """What the throughput of an epoch has beside rates and efficiency: some of ``timing`` (times to load and to
    transform a batch) and ``memory``, divided by commas, or ``none``; in code also a list."""

    def __post_init__(self) -> None:
        """Refuse values we cannot honour, while the user is still looking."""
        for name, known in SETTINGS.items():
            self.__dict__[name] = known.checked(getattr(self, name))

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


SETTINGS: Final = {
    each.name: Setting(each.name, each.default, each.metadata["rule"], each.metadata["secret"])
    for each in fields(Config)
}
"""Every setting, by name."""

DEFAULTS: Final[dict[str, Any]] = {name: known.default for name, known in SETTINGS.items()}
"""Every setting and its default."""

SECRETS: Final = tuple(name for name, known in SETTINGS.items() if known.secret)
"""Settings whose values are shown nowhere: a token, an address that may hold a password, headers that may log in."""

TRACKERS: Final = tuple(name for name, known in SETTINGS.items() if isinstance(known.rule, TrackerChoice))
"""Settings that switch a tracker on or off."""


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
            values[name] = SETTINGS[name].read(variable, text)
        except ConfigError as error:
            ignored.append(IgnoredSetting(variable, ENVIRONMENT, str(error)))
    return values, ignored


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
