"""Settings from code, the environment, a YAML file and pyproject.toml: which wins, and what a mistake is answered with."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import otel_train
from otel_train.api import instrument
from otel_train.autoinstrument import runner
from otel_train.config import Config
from otel_train.config.sources import project_file, resolve
from otel_train.config.validation import FILE_VARIABLE
from otel_train.console.summary import render_run_summary
from otel_train.console.text import TextLayout
from otel_train.doctor import environment
from otel_train.errors import ConfigError
from tests.support.command_line import Cli


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a package in it."""
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    (tmp_path / "repo" / "package").mkdir()
    return tmp_path / "repo"


def table(folder: Path, text: str, name: str = "tool.otel_train") -> Path:
    path = folder / "pyproject.toml"
    path.write_text(f'[project]\nname = "x"\n\n[{name}]\n{text}\n', encoding="utf-8")
    return path


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(**arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(**{"environ": {}, **arguments})
    return str(caught.value)


def ignored(**arguments: Any) -> str:
    """The problem of the one setting that is ignored."""
    resolved = resolve(**{"environ": {}, **arguments})
    assert resolved.config == Config(**arguments.get("settings", {}))
    [one] = resolved.origins.ignored
    return one.problem


# --- who wins -------------------------------------------------------------------------------------


def test_code_wins_over_the_environment_over_yaml_over_pyproject_over_defaults(project: Path) -> None:
    """One order, whatever is set where: the closer to the run, the stronger."""
    places = ("keyword", "config", "environment", "yaml", "project")
    names = ("run_id", "run_name", "profiler_tensorboard", "profiler_output_dir", "profiler_token")
    given = {place: dict.fromkeys(names[number:], place) for number, place in enumerate(places)}
    toml = table(project, "\n".join(f'{name} = "project"' for name in names))
    yaml = yaml_file(project, "\n".join(f"{name}: yaml" for name in names[:4]))
    near: dict[str, Any] = dict.fromkeys(names[:2], "config")

    resolved = resolve(
        Config(**near),
        {"run_id": "keyword"},
        config_file=yaml,
        environ={f"OTEL_TRAIN_{name.upper()}": "environment" for name in names[:3]},
        folder=project,
    )

    assert [getattr(resolved.config, name) for name in names] == [given[place][names[-1]] for place in places]
    assert [resolved.origins[name] for name in names] == ["code", "code", "environment", str(yaml), str(toml)]
    assert resolved.config.run_dir == "runs"
    assert "run_dir" not in resolved.origins


def test_a_keyword_may_set_a_default_back() -> None:
    """Said aloud, a default is a decision: it wins over the environment."""
    resolved = resolve(None, {"console": True}, environ={"OTEL_TRAIN_CONSOLE": "off"})

    assert (resolved.config.console, resolved.origins) == (True, {"console": "code"})


def test_a_file_given_in_code_is_read_in_place_of_the_one_in_the_environment(tmp_path: Path) -> None:
    """One YAML file holds, never a mixture of two."""
    one = yaml_file(tmp_path, "run_id: one")
    environ = {FILE_VARIABLE: "/nowhere.yaml"}

    assert resolve(config_file=one, environ=environ).config.run_id == "one"
    assert resolve(environ={FILE_VARIABLE: str(one)}).config.run_id == "one"


def test_whoever_switches_everything_off_is_not_asked_to_correct_a_file(project: Path) -> None:
    """Switching off must not depend on what is broken. A team that wants it off writes so once, in a file."""
    table(project, "run_dri = 1")
    resolved = resolve(environ={"OTEL_TRAIN_DISABLED": "true", FILE_VARIABLE: "/nowhere"}, folder=project)
    assert resolved.config == Config(disabled=True)

    table(project, "disabled = true")
    assert resolve(environ={}, folder=project).config.disabled is True


# --- which pyproject.toml -------------------------------------------------------------------------


def test_the_nearest_project_file_up_to_the_root_of_the_repository_is_taken(project: Path) -> None:
    """A script is started from anywhere in its repository."""
    outer = table(project, 'run_name = "outer"')
    package = project / "package"

    assert project_file(package) == outer

    inner = package / "pyproject.toml"
    inner.write_text("", encoding="utf-8")

    assert project_file(package) == inner
    assert resolve(environ={}, folder=package).config.run_name == ""


def test_nothing_above_the_repository_is_looked_at(project: Path) -> None:
    """A file in a user's home must not change the runs of every project below it. Outside of one there is no root to stop at."""
    here = table(project.parent, 'run_name = "home"')
    (project.parent / "below").mkdir()

    assert project_file(project / "package") is None
    assert project_file(project.parent / "below") is None
    assert project_file(project.parent) == here


def test_a_folder_whose_parents_may_not_be_searched_has_no_project_file(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that root has begun in a folder of its own, as another user: nothing was recorded."""
    stat = os.stat

    def refuse(path: Any, *args: Any, **how: Any) -> os.stat_result:
        if str(path).startswith(str(project)):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **how)

    monkeypatch.setattr(os, "stat", refuse)

    assert project_file(project) is None


@pytest.mark.parametrize("dependency", ["", '\ndependencies = ["otel-train"]', '\n  "otel-train==1.0",'])
def test_a_project_file_without_our_table_is_not_parsed(project: Path, dependency: str) -> None:
    """A slip elsewhere in it is not for us to complain of."""
    (project / "pyproject.toml").write_text(f"[tool.other\nbroken{dependency}", encoding="utf-8")

    assert resolve(environ={}, folder=project).config == Config()


@pytest.mark.parametrize(
    "text",
    [
        '[tool.otel_train]\nrun_name = "x"',
        '[ tool . "otel_train" ]\nrun_name = "x"',
        "['tool'.'otel_train']\nrun_name = \"x\"",
        '[tool]\notel_train = { run_name = "x" }',
        '[tool]\n  otel_train.run_name = "x"',
        'tool.otel_train.run_name = "x"',
        '[tool]\n"otel_train" . run_name = "x"',
        'tool = { other = 1, otel_train = { run_name = "x" } }',
        'tool = {otel_train={run_name="x"}}',
    ],
)
def test_our_table_is_read_in_every_spelling_of_toml(project: Path, text: str) -> None:
    """A file is parsed only where it may have the table."""
    (project / "pyproject.toml").write_text(text, encoding="utf-8")

    assert resolve(environ={}, folder=project).config.run_name == "x"


def test_a_project_file_that_cannot_be_read_is_said_and_passed_over(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found by luck: no run stops because of it."""
    path = table(project, 'run_name = "x"')

    def denied(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("otel_train.files.read_named", denied)  # root may read everything

    assert ignored(folder=project) == f"{path}: cannot be read: Permission denied. Make it readable"


@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        ("utf-8-sig", "UTF-8 with a byte order mark"),
        ("utf-16", "UTF-16 or UTF-32"),
        ("utf-16-le", "UTF-16 or UTF-32"),
        ("utf-32", "UTF-16 or UTF-32"),
    ],
)
def test_a_project_file_in_an_encoding_that_toml_forbids_is_said(
    project: Path, encoding: str, name: str
) -> None:
    """An editor, or ``>`` of PowerShell, writes it; its table was passed over without a word."""
    path = project / "pyproject.toml"
    path.write_text('[tool.otel_train]\nrun_name = "x"\n', encoding=encoding)

    assert ignored(folder=project) == (
        f"{path}: no TOML: its encoding is {name}. Save it as UTF-8 without a byte order mark; "
        "otel_train reads [tool.otel_train] in it"
    )


def test_a_settings_file_that_never_ends_or_never_begins_is_not_read(tmp_path: Path) -> None:
    """A device gives bytes for ever, and a pipe without a writer blocks the start of training."""
    pipe, endless = tmp_path / "pipe", tmp_path / "endless.yaml"
    os.mkfifo(pipe)
    with endless.open("wb") as file:
        file.truncate(1 << 40)

    assert "no regular file" in ignored(environ={FILE_VARIABLE: "/dev/zero"})
    assert "no regular file" in ignored(environ={FILE_VARIABLE: str(pipe)})
    assert "has more than 4,194,304 bytes" in ignored(environ={FILE_VARIABLE: str(endless)})


def test_a_settings_file_that_is_too_large_is_said_with_its_bound_and_what_to_do(project: Path) -> None:
    """otel_train writes no ``pyproject.toml``, and this one is readable."""
    toml, yaml = table(project, "#" * (4 << 20)), yaml_file(project, "#" * (5 << 20))
    said = (
        "cannot be read: has more than 4,194,304 bytes, the most that is read of it. "
        "Give the settings in a smaller YAML file, which OTEL_TRAIN_CONFIG names"
    )

    assert ignored(folder=project) == f"{toml}: {said}"
    assert refused(config_file=yaml) == f"config_file={str(yaml)!r}: {said}"


def test_a_settings_file_nested_without_end_is_not_honoured(tmp_path: Path, project: Path) -> None:
    """Parsers that call themselves run out of stack; one that expands aliases runs out of memory."""
    deep = yaml_file(tmp_path, "run_id: " + "[" * 5000)
    assert "no YAML" in ignored(environ={FILE_VARIABLE: str(deep)})

    layers = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))
    bomb = yaml_file(tmp_path, f"a0: &a0 [x]\n{layers}\nrun_id: *a11\n")
    problem = resolve(environ={FILE_VARIABLE: str(bomb)}).origins.ignored[0].problem
    assert "expected text" in problem
    assert len(problem) < 3000

    table(project, "x = " + "[" * 5000)
    assert "no TOML" in ignored(folder=project)


# --- how values read ------------------------------------------------------------------------------


def test_values_of_files_read_as_in_code_and_as_in_the_environment(tmp_path: Path) -> None:
    """YAML takes a bare on for true, and 1e9 for a text; neither is its author's fault. An empty file sets nothing."""
    path = yaml_file(
        tmp_path,
        "otlp: on\nprofiler: off\nwandb: off\nprometheus: no\nexport_every_s: 5\nmax_run_dir_bytes: '1000000000'\n"
        "stall_after_s: 1e3\nconsole_blocks: [profiling, throughput]\nrun_id:\n",
    )

    config = resolve(config_file=path, environ={}).config

    assert (config.otlp, config.profiler, config.wandb, config.prometheus) == ("on", "off", "off", False)
    assert (config.export_interval_s, config.max_run_dir_bytes, config.stall_after_s) == (5.0, 10**9, 1000.0)
    assert config.console_metrics == "profiling,throughput"
    assert config.run_id == ""
    assert resolve(config_file=yaml_file(tmp_path, "# run_id: x\n"), environ={}).config == Config()


def test_a_tracker_may_be_described_by_a_table(project: Path) -> None:
    """What code says with a dict, a file says with a table."""
    table(project, 'run_id = "x"\n[tool.otel_train.mlflow]\nexperiment_name = "mine"')

    resolved = resolve(environ={}, folder=project)

    assert resolved.config.mlflow == "on"
    assert resolved.given == {"mlflow": {"experiment_name": "mine"}}
    assert resolve(None, {"mlflow": "off"}, environ={}, folder=project).given == {}


# --- what a mistake is answered with -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run_dri: x", "run_dri: not a setting of otel_train. Did you mean run_dir?"),
        ("max_label_values: 70", "max_label_values=70: expected 1 to 64. Leave it out for the default, 16"),
        ("flight_recorder: maybe", "flight_recorder='maybe': expected true or false"),
        ("otlp: {a: 1}", "otlp={'a': 1}: expected one value, no table"),
        ("- run_id", "list: expected names of settings with a value each"),
        ("run_id: [", "no YAML: "),
        ("run_id: !!python/object:os.system x", "no YAML: "),
    ],
)
def test_a_mistake_in_a_yaml_file_is_reported_with_the_file_and_the_key_and_ignored(
    tmp_path: Path, text: str, said: str
) -> None:
    """Whoever reads the message knows where to look, what is wrong, and what would be right."""
    path = yaml_file(tmp_path, text)

    assert ignored(config_file=path).startswith(f"config_file={str(path)!r}: {said}")
    assert ignored(environ={FILE_VARIABLE: str(path)}).startswith(f"{FILE_VARIABLE}={str(path)!r}: {said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run_dri = 1", ": [tool.otel_train]: run_dri: not a setting of otel_train. Did you mean run_dir?"),
        ("trace_rate_per_s = 0", ": [tool.otel_train]: trace_rate_per_s=0.0: expected more than 0."),
        ("x = [", ": no TOML: "),
    ],
)
def test_a_mistake_in_pyproject_is_reported_with_the_file_the_table_and_the_key_and_ignored(
    project: Path, text: str, said: str
) -> None:
    """As above. Also where code overrides it: it would come into force on the day when the keyword goes."""
    path = table(project, text)

    for settings in ({}, {"trace_rate_per_s": 3.0}):
        assert ignored(settings=settings, folder=project).startswith(str(path) + said)


def test_a_table_with_a_dash_is_not_passed_over(project: Path) -> None:
    """The package is called otel-train; whoever writes that must get a message."""
    table(project, "run_id = 'x'", name="tool.otel-train")

    assert "Write [tool.otel_train]" in ignored(folder=project)


def test_a_yaml_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """It was asked for by name. A variable that names one is of the environment, and stops nothing."""
    path = tmp_path / "no.yaml"
    end = f"={str(path)!r}: cannot be read: No such file or directory. Give the path of a YAML file"

    assert refused(config_file=path) == f"config_file{end}"
    assert ignored(environ={FILE_VARIABLE: str(path)}) == f"{FILE_VARIABLE}{end}"


def test_what_is_wrong_leaves_the_rest_of_its_file_and_the_places_below_in_force(project: Path) -> None:
    """A wrong value is as if it were not there."""
    path = table(project, 'run_name = "mine"\nexport_every_s = 5\nmax_label_values = -1')

    resolved = resolve(environ={"OTEL_TRAIN_EXPORT_INTERVAL_S": "fast"}, folder=project)

    assert (resolved.config.run_name, resolved.config.export_interval_s) == ("mine", 5.0)
    assert resolved.config.max_label_values == 16
    assert [(one.name, one.origin, one.used) for one in resolved.origins.ignored] == [
        ("OTEL_TRAIN_EXPORT_INTERVAL_S", "environment", "export_interval_s=5.0"),
        ("max_label_values", str(path), "max_label_values=16"),
    ]


@pytest.mark.parametrize("token", ["s3c\nret", "s3c ret", "s3cr\xe9t", "s3c\udcffret"])
def test_a_token_that_no_http_header_carries_is_ignored_and_not_shown(token: str, tmp_path: Path) -> None:
    """Each ``POST /capture`` would be refused, or fail. The message lands in a log, and in summary.json."""
    [one] = resolve(environ={"OTEL_TRAIN_PROFILER_TOKEN": token}, folder=tmp_path).origins.ignored

    assert one.problem.startswith(
        "OTEL_TRAIN_PROFILER_TOKEN=(not shown): expected printable ASCII characters"
    )
    assert one.used == ""


def test_without_yaml_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """YAML is an extra; everything else works without it."""
    monkeypatch.setitem(sys.modules, "yaml", None)

    assert "Run: pip install 'otel-train[yaml]'" in refused(config_file=yaml_file(tmp_path, "run_id: x"))
    assert resolve(environ={}, folder=tmp_path).config == Config()


def test_a_variable_close_to_that_of_the_file_gets_its_name() -> None:
    """``OTEL_TRAIN_CONFIG_FILE`` would be passed over in silence otherwise."""
    message = ignored(environ={"OTEL_TRAIN_CONFIG_FILE": "x.yaml"})

    assert message.endswith("Did you mean OTEL_TRAIN_CONFIG?")


def test_of_many_names_that_are_no_settings_ten_are_said_and_the_rest_counted(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of another program has thousands: each took a kilobyte of log, of ``run.json`` and of ``summary.json``."""
    names = [f"key_{number}" for number in range(5000)]
    toml = table(project, "max_label_values = -1\n" + "\n".join(f"{name} = 1" for name in names))
    file = yaml_file(tmp_path, "\n".join(f"{name}: 1" for name in names))
    looked_up: list[str] = []
    monkeypatch.setattr(
        "otel_train.config.deprecated.near", lambda name, _, **_cutoff: looked_up.append(name)
    )
    environ = {"OTEL_TRAIN_CONFIG": str(file), **{f"OTEL_TRAIN_{name}": "1" for name in names[:12]}}

    ignored = resolve(environ=environ, folder=project).origins.ignored

    rest = "names that are no settings of otel_train: {} more. Remove them"
    assert [one.problem for one in ignored if "more. Remove them" in one.problem] == [
        rest.format(2),
        f"OTEL_TRAIN_CONFIG={str(file)!r}: {rest.format(4990)}",
        f"{toml}: [tool.otel_train]: {rest.format(4990)}",
    ]
    assert [one.name for one in ignored if one.origin == str(file)] == [*names[:10], "4990 more"]
    assert [one.name for one in ignored if one.origin == str(toml)] == [
        "max_label_values",
        *names[:10],
        "4990 more",
    ]
    assert len(looked_up) == 30


# --- where it shows -------------------------------------------------------------------------------


def test_a_run_says_where_each_of_its_settings_comes_from(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary explains, weeks later, why this run was different."""
    toml = table(project, 'run_name = "from the project"\nconsole = false')
    yaml = yaml_file(tmp_path, f"run_dir: {tmp_path}/runs\nprometheus: false\nartifacts: true")
    monkeypatch.chdir(project / "package")
    monkeypatch.delenv("OTEL_TRAIN_AGENT")

    session = instrument(config_file=yaml, run_id="x")
    session.close()

    expected = {
        "run_id": "code", "run_dir": str(yaml), "prometheus": str(yaml), "artifacts": str(yaml),
        "run_name": str(toml), "console": str(toml),
    }  # fmt: skip
    run = tmp_path / "runs" / "x"
    for name in ("run.json", "rank0/summary.json", "artifacts/config.json"):
        assert json.loads((run / name).read_text(encoding="utf-8"))["settings_from"] == expected
    assert otel_train.current() is None


def test_the_run_summary_names_files_that_settings_come_from() -> None:
    """Whoever starts a run may not know of a file that another user wrote."""
    origins = {"run_dir": "/a/pyproject.toml", "otlp": "environment", "console": "code", "wandb": "/b"}
    run_summary = render_run_summary(TextLayout(80), {"settings_from": origins})

    assert "settings   run_dir from /a/pyproject.toml\n" in run_summary
    assert "wandb from /b\n" in run_summary
    assert "otlp" not in run_summary


def test_the_doctor_names_the_file_of_a_setting_and_hides_secrets_in_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output lands in bug reports."""
    path = table(project, 'run_name = "mine"\ncapture_token = "s3cret"\ndisabled = true')
    monkeypatch.chdir(project)

    found = list(environment.check_settings({"OTEL_TRAIN_OTLP": "off"}))
    text = "\n".join(f"{finding.what} | {finding.remedy}" for finding in found)

    assert f"run_name=mine ({path})" in text
    assert f"profiler_token=(set, not shown) ({path})" in text
    assert f"disabled switches everything off | unset disabled in {path}" in text
    assert f"1 from the environment, 3 from {path}" in text
    assert "s3cret" not in text


def test_a_program_below_the_launcher_gets_the_same_file_wherever_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frameworks change the working directory before they train."""
    path = yaml_file(tmp_path, "run_dir: here")
    monkeypatch.chdir(tmp_path)

    environ = runner.environment({FILE_VARIABLE: "settings.yaml"}, {}, tmp_path / "launch")

    assert environ[FILE_VARIABLE] == str(path)
    assert environ["OTEL_TRAIN_RUN_DIR"] == str(tmp_path / "here")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--set export_interval_s=fast", "otel-train: --set export_interval_s='fast': expected a number"),
        ("--export-interval-s fast", "otel-train: --export-interval-s='fast': expected a number"),
        ("--set export_every", "--set export_every: expected NAME=VALUE"),
        ("--set =3", "--set =3: "),
        (
            "--set export_intervall_s=1",
            "--set export_intervall_s=1: export_intervall_s: not a setting of otel_train. Did you mean export_interval_s?",
        ),
        ("--config no.yaml", "cannot be read: No such file"),
        ("--endpoint collector", "OTLP endpoint 'collector' for metrics: expected http://host:port"),
    ],
)
def test_the_command_line_refuses_a_wrong_option_before_anything_runs(
    option: str, said: str, tmp_path: Path, cli: Cli
) -> None:
    """Exit code 2 and one line: an option is an argument, not a part of the environment."""
    (tmp_path / "train.py").write_text("print('ran')", encoding="utf-8")
    ended = cli("run", *option.split(), tmp_path / "train.py")

    assert said in ended.refused
    assert "ran" not in ended.out


def test_commands_look_for_runs_where_the_settings_of_the_folder_put_them(
    project: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """A run that its own tool does not find is lost to its user."""
    table(project, 'run_dir = "elsewhere"\nprometheus = false\nconsole = false')
    monkeypatch.chdir(project)
    instrument(run_id="mine").close()

    assert "run mine" in cli("summary").printed

    table(project, "run_dri = 1")
    monkeypatch.delenv("OTEL_TRAIN_RUN_DIR", raising=False)
    assert "No run below runs" in cli("summary").refused  # the default folder, which has no run


def test_files_are_read_where_a_session_starts_and_nowhere_else() -> None:
    """Neither a loader worker nor a step may wait for a disk: what they run knows nothing of sources."""
    package = Path(otel_train.__file__).parent
    users = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "from otel_train.config.sources import" in path.read_text(encoding="utf-8")
    }

    assert {user for user in users if not user.startswith(("cli/", "doctor/"))} == {
        "api.py", "integrations/shared_session.py", "autoinstrument/runner.py",
    }  # fmt: skip
