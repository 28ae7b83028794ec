"""The settings, as one frozen object."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar

from otel_train.config.validation import (
    FILE_VARIABLE,
    FORMER_VALUES,
    MIB,
    MOST_CHARS,
    MOST_NAMED,
    PREFIX,
    RESERVED,
    Address,
    BearerToken,
    Between,
    ChoiceOrAddress,
    HttpUrl,
    IgnoredSetting,
    MoreThan,
    NamedNumbers,
    OneOf,
    Plain,
    PowerOfTwo,
    Setting,
    SomeOf,
    TrackerChoice,
    ValueRule,
    read_parts,
    text_of,
    variable_of,
)
from otel_train.errors import ConfigError
from otel_train.fast_classes import FastNamedTuple, fast_dataclass
from otel_train.safety import PrintableRecords

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

CODE, ENVIRONMENT = "code", "environment"
"""Origins of settings in ``ResolvedConfig.origins``; settings from a file have its path instead."""

ACTIVITIES: Final = ("cpu", "cuda", "xpu", "mtia")
"""Activities that torch.profiler can record."""

BLOCKS: Final = ("profiling", "throughput", "profiler")
"""Blocks that ``console_metrics`` can print."""

PROFILER_OPTIONS: Final = ("record_shapes", "with_stack", "profile_memory", "with_flops")
"""Boolean arguments of ``torch.profiler.profile``."""

MOST_TOP: Final = 100
"""Largest value of ``profiler_top``: operators and kernels printed after a capture."""

_log = logging.getLogger("otel_train")
_log.addFilter(PrintableRecords())

_warned: set[str] = set()

INTERVAL_VARIABLE: Final = "OTEL_METRIC_EXPORT_INTERVAL"
"""OpenTelemetry's standard variable for ``export_interval_s``, in milliseconds."""


class ProfilerSchedule(FastNamedTuple):
    """Parts of ``profiler_schedule``, in steps."""

    skip_first: int = 10
    wait: int = 0
    warmup: int = 1
    active: int = 5
    repeat: int = 0


class ProfilerEvery(FastNamedTuple):
    """Parts of ``profiler_every``; 0: never."""

    steps: int = 0
    epochs: int = 0
    minutes: float = 0.0
    epoch: tuple[int, ...] = ()


class Tuning(FastNamedTuple):
    """Parts of ``tuning``."""

    poll_interval_s: float = 0.5
    summary_interval_s: float = 30.0
    rank_report_interval_s: float = 5.0
    trace_warmup_steps: int = 5
    trace_every_steps: int = 0
    trace_burst: int = 20
    profiler_cooldown_s: float = 600.0
    profiler_max_s: float = 60.0


T = TypeVar("T", bool, int, float, str)


def setting(*, default: T, rule: ValueRule = ValueRule(), secret: bool = False) -> T:  # noqa: B008 - a rule has no state
    """Defines a field of ``Config``. Its docstring is the row of the setting on the reference page."""
    made: T = field(default=default, metadata={"rule": rule, "secret": secret})
    return made


@fast_dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a session. Keywords take precedence over a Config, a Config over the environment, the environment over files.

    Each is explained in docs/reference/settings.md.

    Standard ``OTEL_*`` variables (endpoint, headers, protocol, service name) keep their meaning and are
    not repeated here.

    Raises:
        ConfigError: a value cannot be honoured; the message has value, rule and remedy.
    """

    disabled: bool = setting(default=False)
    """Disable otel_train: no hook, no thread, no socket, no file."""

    run_id: str = setting(default="", rule=Plain())
    """Id of the run, the same on all ranks and after restarts. Empty: taken from the launcher, else generated. No control characters."""

    run_name: str = setting(default="", rule=Plain())
    """Display name of the run. Empty: the run id. No control characters."""

    run_dir: str = setting(default="runs", rule=Plain(filled=True))
    """Folder that holds one run directory per run. Created if missing."""

    attempt: int = setting(default=-1, rule=Between(-1, 1 << 31))
    """Number of this start of the run, from 0. -1: detected."""

    prometheus: bool = setting(default=True)
    """Serve ``/metrics``."""

    prometheus_address: str = setting(default="127.0.0.1:9464", rule=Address())
    """Address of ``/metrics``, as host:port. The next free port is used if it is taken; port 0: any free port. Every client that
    reaches a host other than loopback can read the metrics."""

    otlp: str = setting(default="auto", rule=OneOf("auto", "on", "off"))
    """Export by OTLP: ``auto`` (if an ``OTEL_EXPORTER_OTLP*_ENDPOINT`` is set), ``on`` or ``off``."""

    export_interval_s: float = setting(default=15.0, rule=Between(0.1, 3600))
    """Seconds between exports of metrics, 0.1 to 3600. Alert rules assume at most 60."""

    agent: str = setting(default="process", rule=OneOf("process", "thread", "off"))
    """Where events are aggregated and exported: ``process`` (an agent process; a thread if no process can be started),
    ``thread`` (a thread of the program, for sandboxes that forbid child processes) or ``off`` (nothing is recorded)."""

    log_every_steps: int = setting(default=0, rule=Between(0))
    """Training steps between two rows for trackers, and between two progress lines on the console. 0: 50 for trackers, no
    progress lines."""

    log_every_epochs: int = setting(default=1, rule=Between(0))
    """Epochs between two throughput rows for trackers. 0: none."""

    console: bool = setting(default=True)
    """Print the run summary at the end, on rank 0."""

    flight_recorder: bool = setting(default=True)
    """Write ``flight.bin``, a copy of the last steps that survives a crash."""

    flight_recorder_events: int = setting(default=1 << 18, rule=PowerOfTwo(1 << 12, 1 << 24))
    """Start and end events that the ring buffer of a thread holds; two per stage. A power of two from 4096 to 16777216."""

    trace_slow_factor: float = setting(default=2.0, rule=MoreThan(1))
    """Keep the trace of a step that takes this many times the median step. More than 1."""

    trace_rate_per_s: float = setting(default=2.0, rule=MoreThan(0))
    """Step traces kept per second, on average. More than 0."""

    stall_after_s: float = setting(default=300.0, rule=MoreThan(0))
    """Seconds without progress after which the run counts as stalled; 20 median steps if that is longer, up to 6 times this value
    or 3 median steps. More than 0."""

    max_label_values: int = setting(default=16, rule=Between(1, 64))
    """Most loader names in metrics, 1 to 64, and half as many names of user-defined stages; further names become ``_OTHER``."""

    exit_timeout_s: float = setting(default=1.5, rule=Between(0, 60))
    """Seconds that exporting may delay the end of the program, 0 to 60. Unsent requests stay in the spool."""

    total_steps: int = setting(default=0, rule=Between(0))
    """Planned number of steps, for ``train.run.progress.ratio``. 0: unknown."""

    checkpoint_every_s: float = setting(default=0.0, rule=Between(0, 1e9))
    """Expected seconds between checkpoints, for the alert on missing ones. 0: learned from the run."""

    flops_per_sample: float = setting(default=0.0, rule=Between(0, 1e30))
    """Model FLOPs of one training sample, forward and backward. 0: unknown."""

    device_flops: float = setting(default=0.0, rule=Between(0, 1e30))
    """Peak dense FLOP/s of one device at the dtype of training. 0: the BF16 rate of the data sheet, for known devices."""

    flops: str = setting(default="given", rule=OneOf("given", "auto"))
    """Source of the model FLOPs: ``given`` (``flops_per_sample``) or ``auto`` (if that is 0, one step of the run is counted)."""

    max_run_dir_bytes: int = setting(default=256 * MIB, rule=Between(16 * MIB))
    """Most bytes of events, metrics and spans in the run directory, per rank. At least 16 MiB. Unsent requests (at most 64 MiB),
    rejected ones (32 MiB), flight files and captures are not included."""

    cuda_timing: str = setting(default="events", rule=OneOf("events", "sync", "off"))
    """Device time: ``events`` (CUDA events, read later), ``sync`` (synchronises at start and end of each stage: slow) or ``off``."""

    hardware: str = setting(default="auto", rule=ChoiceOrAddress("auto", "on", "off"))
    """Utilisation, power and temperature of GPUs from NVML: ``auto`` (if no DCGM exporter answers at 127.0.0.1:9400), ``on``,
    ``off``, or the host:port of the DCGM exporter to check instead."""

    profiler: str = setting(default="on_demand", rule=OneOf("on_demand", "auto", "off"))
    """Profiler captures: ``on_demand`` (requested by the program, ``otel-train profile``, HTTP, SIGUSR2, an alert or
    ``profiler_every``), ``auto`` (also when steps become slow) or ``off``."""

    alertmanager_url: str = setting(default="", rule=HttpUrl(), secret=True)
    """Address of an Alertmanager, such as ``http://alertmanager:9093``. It is polled every 15 s for firing alerts on this rank
    with the label ``capture="true"``; each starts a capture. Empty: no captures by alerts."""

    alertmanager_headers: str = setting(default="", rule=Plain(), secret=True)
    """HTTP headers of requests to ``alertmanager_url``: ``name=value``, separated by commas, values percent-encoded, as in
    ``OTEL_EXPORTER_OTLP_HEADERS``."""

    profiler_schedule: str = setting(
        default="",
        rule=NamedNumbers(ProfilerSchedule, wait=(0, 10_000), warmup=(0, 10_000), active=(1, 10_000)),
    )
    """Steps of a capture, as in ``torch.profiler.schedule``: ``wait=0``, then ``warmup=1``, whose output is discarded, then
    ``active=5`` recorded steps. Captures by ``profiler_every`` begin after ``skip_first=10`` steps; at most ``repeat=0`` of them
    are made, 0: any number. Empty: these values. The end of a capture blocks training for 15 ms per MB of trace."""

    profiler_every: str = setting(
        default="", rule=NamedNumbers(ProfilerEvery, minutes=(0, 1e9), epoch=(1, math.inf))
    )
    """Captures by schedule, on all ranks: every ``steps=500`` steps, at the start of every ``epochs=2`` epochs, every
    ``minutes=30``, or at the start of given epochs, ``epoch=1,epoch=3``; separated by commas. Empty: none."""

    profiler_activities: str = setting(default="cpu,cuda", rule=SomeOf(*ACTIVITIES))
    """Activities to record, of ``cpu``, ``cuda``, ``xpu``, ``mtia``. Unavailable ones are skipped and logged."""

    profiler_options: str = setting(default="", rule=SomeOf("", *PROFILER_OPTIONS))
    """Options of ``torch.profiler``, of ``record_shapes``, ``with_stack`` (recorded steps take 20 to 30 % longer),
    ``profile_memory`` (every allocation) and ``with_flops``, separated by commas; in code also a list."""

    profiler_max_bytes: int = setting(default=64 * MIB, rule=Between(1))
    """Largest trace file in bytes. A larger one is deleted; later captures have fewer steps, so that they fit."""

    profiler_kept: int = setting(default=8, rule=Between(1))
    """Captures kept per rank; the oldest one that is not pinned is removed first. 1 or more."""

    profiler_token: str = setting(default="", rule=BearerToken(), secret=True)
    """Token that ``POST /capture`` requires, of printable ASCII characters without spaces. Empty: generated, and written to
    ``capture-token`` in the folder of the rank."""

    profiler_tensorboard: str = setting(default="", rule=Plain())
    """Folder to which traces are copied for TensorBoard's profiler plugin. Empty: none."""

    profiler_output_dir: str = setting(default="", rule=Plain())
    """Folder to which each trace is also written, as uncompressed ``epoch_N.json``; none is removed. Empty: none."""

    profiler_top: int = setting(default=5, rule=Between(0, MOST_TOP))
    """Operators and kernels printed below the finding after a capture, 0 to 100. 0: nothing is printed."""

    artifacts: bool = setting(default=False)
    """Write the artifacts of rank 0 to ``artifacts/`` in the run directory at the end of the run. After a crash ``otel-train run``
    writes them. ``otel-train export`` writes them at any time."""

    export_profile: str = setting(
        default="auto", rule=OneOf("auto", "full", "reduced", "rank0_aggregate", "rank0")
    )
    """What each rank exports: ``full`` (everything), ``reduced`` (fewer series), ``rank0_aggregate`` (rank 0 exports for all ranks;
    traces of one rank per node) or ``rank0`` (only rank 0 exports). ``auto``: ``full`` up to 64 ranks, ``reduced`` up to 2048,
    above ``rank0_aggregate``."""

    tensor_parallel: int = setting(default=1, rule=Between(1, 1 << 31))
    """Consecutive ranks that process the same samples: tensor parallel size times context parallel size. Only the first of them
    counts samples. Needed only without a ``DeviceMesh`` or Megatron, from which it is detected."""

    pipeline_parallel: int = setting(default=1, rule=Between(1, 1 << 31))
    """Number of pipeline stages, each of consecutive ranks. Only ranks of the first stage count samples."""

    wandb: str = setting(default="auto", rule=TrackerChoice())
    """Log to W&B, on rank 0: ``auto`` (to the run that the program opens, if any), ``on`` (to a separate run) or ``off``. As
    keyword of ``instrument`` also True, False, a run, or a dict of arguments of ``wandb.init``."""

    mlflow: str = setting(default="auto", rule=TrackerChoice())
    """Log to MLflow, on rank 0: ``auto`` (to the run that the program opens, if any), ``on`` (to a separate run) or ``off``. As
    keyword of ``instrument`` also True, False, a run, or a dict of ``tracking_uri``, ``experiment_name``, ``run_name``."""

    tensorboard: str = setting(default="auto", rule=TrackerChoice())
    """Write TensorBoard event files, on rank 0, to ``tensorboard/`` in the run directory: ``auto`` (once the program has imported
    TensorBoard), ``on`` or ``off``. As keyword of ``instrument`` also True, False, a ``SummaryWriter``, or a dict with
    ``log_dir``."""

    exporters: str = setting(default="auto", rule=Plain(filled=True, listed=True))
    """Exporters of other packages (entry points ``otel_train.exporters``): ``auto`` (all that are installed), ``off``, or names,
    separated by commas; in code also a list."""

    console_metrics: str = setting(default="", rule=SomeOf("", *BLOCKS))
    """Blocks printed on standard error, on rank 0, of ``profiling`` (stage times, every ``log_every_steps``), ``throughput`` (every
    ``log_every_epochs``) and ``profiler`` (after a capture), separated by commas; in code also a list. Empty: none."""

    throughput_metrics: str = setting(default="timing,memory", rule=SomeOf("timing", "memory", "none"))
    """What a throughput row has in addition to rates and efficiency: ``timing`` (times to load and to transform a batch) and
    ``memory``, separated by commas, or ``none``; in code also a list."""

    tuning: str = setting(
        default="",
        rule=NamedNumbers(
            Tuning, poll_interval_s=(0.01, 10), summary_interval_s=(1, 1e9), rank_report_interval_s=(0, 3600),
            trace_burst=(1, math.inf), profiler_cooldown_s=(0, 1e9), profiler_max_s=(1e-3, 1e9),
        ),
    )  # fmt: skip
    """Intervals and limits for tests and measurements of otel_train; they may change in any version: ``poll_interval_s=0.5``
    (between two rounds of the export loop, which reads the ring buffers every 2 s or when one has 2048 new events),
    ``summary_interval_s=30``, ``rank_report_interval_s=5`` (0: no rank reports), ``trace_warmup_steps=5``, ``trace_every_steps=0``
    (0: by the step rate), ``trace_burst=20``, ``profiler_cooldown_s=600`` (between two automatic captures of one cause),
    ``profiler_max_s=60`` (longest capture)."""

    if not TYPE_CHECKING:  # type checkers see the fields

        def __init__(self, **given: Any) -> None:
            values, deprecated = present(given)
            for name in values:
                if name not in SETTINGS:
                    raise ConfigError(unknown(name))
            for name, known in SETTINGS.items():
                self.__dict__[name] = known.checked(values[name]) if name in values else known.default
            warn((), deprecated)

    def schedule(self) -> ProfilerSchedule:
        """Returns the parts of ``profiler_schedule``."""
        return read_parts(ProfilerSchedule, self.profiler_schedule)

    def tuned(self) -> Tuning:
        """Returns the parts of ``tuning``."""
        return read_parts(Tuning, self.tuning)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Reads the variables ``OTEL_TRAIN_*``. An empty value counts as not set.

        A wrong value, or a variable with this prefix that is not a setting, is logged and ignored.
        """
        given = settings_in(os.environ if environ is None else environ)
        config = cls(**given.values)
        warn(in_force(given.ignored, config), given.deprecated)
        return config

    def to_env(self) -> dict[str, str]:
        """Returns the settings that differ from their default, as environment variables.

        ``Config.from_env(config.to_env()) == config``.
        """
        return {variable_of(name): text_of(value) for name, value in changed(self).items()}


SETTINGS: Final = {
    each.name: Setting(each.name, each.default, each.metadata["rule"], each.metadata["secret"])
    for each in fields(Config)
}
"""Every setting, by name."""

DEFAULTS: Final[dict[str, Any]] = {name: known.default for name, known in SETTINGS.items()}
"""Every setting and its default."""

SECRETS: Final = tuple(name for name, known in SETTINGS.items() if known.secret)
"""Settings whose values are never shown: a token, an address that may have a password, headers that may have credentials."""

TRACKERS: Final = tuple(name for name, known in SETTINGS.items() if isinstance(known.rule, TrackerChoice))
"""Settings that switch a tracker on or off."""

TRACKER_MODULES: Final = {
    **{name: (name,) for name in TRACKERS},
    "tensorboard": ("torch.utils.tensorboard", "tensorboardX", "tensorboard"),
}
"""Modules by setting: a program that has imported one of them uses this tracker."""


class Origins(dict[str, str]):
    """The source of each setting that was given, by name.

    Attributes:
        ignored: wrong settings of the environment or a file.
        deprecated: a message for each former name or value, with its replacement.
    """

    ignored: tuple[IgnoredSetting, ...] = ()
    deprecated: tuple[str, ...] = ()


class ResolvedConfig(FastNamedTuple):
    """The settings in force.

    Attributes:
        config: the settings.
        origins: the source of each setting that was given, by name, and the ignored ones.
        given: arguments of trackers that a file has as a table, by the name of the setting.
    """

    config: Config
    origins: Origins
    given: Mapping[str, Mapping[str, Any]]


def changed(config: Config) -> dict[str, Any]:
    """Returns the settings that differ from their default."""
    values = {name: getattr(config, name) for name in DEFAULTS}
    return {name: value for name, value in values.items() if value != DEFAULTS[name]}


def present(given: Mapping[str, Any], *, variables: bool = False) -> tuple[dict[str, Any], tuple[str, ...]]:
    """See ``config.deprecated.present``, which is imported only if a name or a value may be a former one."""
    former = any(given.get(name) in tuple(values) for name, values in FORMER_VALUES.items())
    if given.keys() <= SETTINGS.keys() and not former:
        return dict(given), ()
    from otel_train.config import deprecated

    return deprecated.present(given, variables=variables, secrets=SECRETS)


def unknown(name: str, *, variables: bool = False, parameters: Iterable[str] = ()) -> str:
    """Returns the message for a setting or variable that does not exist; ``parameters`` are further names to suggest."""
    from otel_train.config import deprecated

    known = (*map(variable_of, SETTINGS), FILE_VARIABLE) if variables else tuple(SETTINGS)
    return deprecated.unknown(name, known, variables=variables, parameters=parameters)


def unknown_names(
    names: Sequence[str], origin: str, where: str = "", *, variables: bool = False
) -> list[IgnoredSetting]:
    """Returns a message for each of the first ``MOST_NAMED`` unknown names, and one with the number of the others."""
    shown = [name[:MOST_CHARS] for name in names[:MOST_NAMED]]
    ignored = [IgnoredSetting(name, origin, f"{where}{unknown(name, variables=variables)}") for name in shown]
    if more := len(names) - len(shown):
        problem = f"{where}names that are no settings of otel_train: {more} more. Remove them"
        ignored.append(IgnoredSetting(f"{more} more", origin, problem))
    return ignored


class GivenSettings(FastNamedTuple):
    """Settings of one source: valid values, ignored ones, and messages for former names."""

    values: dict[str, Any]
    ignored: list[IgnoredSetting]
    deprecated: tuple[str, ...] = ()


def settings_in(environ: Mapping[str, str]) -> GivenSettings:
    """Reads the settings in an environment."""
    texts: dict[str, Any] = {}
    for variable, text in environ.items():
        name = variable.removeprefix(PREFIX)
        if text and name != variable and variable not in RESERVED:
            texts[name.lower() if name.upper() == name else variable] = text
    texts, deprecated = present(texts, variables=True)
    values: dict[str, Any] = {}
    ignored: list[IgnoredSetting] = []
    unknown_variables: list[str] = []
    for name, text in texts.items():
        variable = name if name.startswith(PREFIX) else variable_of(name)
        try:
            known = SETTINGS.get(name)
            if known is None:
                unknown_variables.append(variable)
            else:
                values[name] = known.read(variable, text_of(text))
        except ConfigError as error:
            ignored.append(IgnoredSetting(variable[:MOST_CHARS], ENVIRONMENT, str(error)))
    ignored += unknown_names(unknown_variables, ENVIRONMENT, variables=True)
    _read_standard_interval(environ, values, ignored)
    return GivenSettings(values, ignored, deprecated)


def _read_standard_interval(
    environ: Mapping[str, str], values: dict[str, Any], ignored: list[IgnoredSetting]
) -> None:
    """Reads ``OTEL_METRIC_EXPORT_INTERVAL``, in milliseconds, unless ``OTEL_TRAIN_EXPORT_INTERVAL_S`` is set."""
    text = environ.get(INTERVAL_VARIABLE, "").strip()
    if not text or "export_interval_s" in values:
        return
    try:
        values["export_interval_s"] = SETTINGS["export_interval_s"].checked(float(text) / 1000)
    except (ValueError, ConfigError):
        problem = f"{INTERVAL_VARIABLE}={text[:MOST_CHARS]!r}: expected milliseconds, 100 to 3600000"
        ignored.append(IgnoredSetting(INTERVAL_VARIABLE, ENVIRONMENT, problem))


def in_force(ignored: Iterable[IgnoredSetting], config: Config) -> tuple[IgnoredSetting, ...]:
    """Returns the ignored settings, each with the value that is used instead."""
    return tuple(
        each._replace(used=_used(each.name.removeprefix(PREFIX).lower(), config)) for each in ignored
    )


def _used(name: str, config: Config) -> str:
    return f"{name}={getattr(config, name)!r}" if name in DEFAULTS and name not in SECRETS else ""


def warn(ignored: Iterable[IgnoredSetting], deprecated: Iterable[str] = ()) -> None:
    """Logs each setting that is ignored and each former name, once per process."""
    texts = {each.problem: str(each) for each in ignored} | {each: each for each in deprecated}
    for problem, text in texts.items():
        if problem not in _warned:
            _warned.add(problem)
            _log.warning("settings: %s", text)
