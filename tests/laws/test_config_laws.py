"""Laws of the settings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from otel_train.config.settings import DEFAULTS, SETTINGS, Config, settings_in
from otel_train.config.sources import resolve
from otel_train.config.validation import (
    PREFIX,
    Address,
    BearerToken,
    Between,
    ChoiceOrAddress,
    HttpUrl,
    MoreThan,
    NamedNumbers,
    OneOf,
    Plain,
    PowerOfTwo,
    SomeOf,
    ValueRule,
)  # fmt: skip


def values_of(name: str) -> st.SearchStrategy[Any]:
    """Every value that a setting allows."""
    default, rule = SETTINGS[name].default, SETTINGS[name].rule
    if isinstance(rule, OneOf):
        addresses = ("dcgm:9400",) if isinstance(rule, ChoiceOrAddress) else ()
        return st.sampled_from((*rule.choices, *addresses))
    if isinstance(rule, PowerOfTwo):
        return st.integers(12, 24).map(lambda power: 1 << power)
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, str):
        return texts_of(rule)
    assert isinstance(rule, (Between, MoreThan))
    low = rule.low if isinstance(rule, Between) else math.nextafter(rule.low, math.inf)
    high = rule.high if isinstance(rule, Between) else math.inf
    if isinstance(default, int):
        return st.integers(int(low), int(min(high, 1 << 40)))
    return st.floats(low, min(high, 1e300), allow_nan=False)


def texts_of(rule: ValueRule) -> st.SearchStrategy[str]:
    """What an environment can hold, less what we refuse; surrogates stand for bytes that are not UTF-8."""
    if isinstance(rule, SomeOf):
        return st.lists(st.sampled_from(rule.choices), min_size=1, unique=True).map(",".join)
    if isinstance(rule, NamedNumbers):
        parts = st.sampled_from([name for name, default in rule.defaults.items() if default != 0.5])
        return st.lists(st.tuples(parts, st.integers(1, 10))).map(
            lambda pairs: ",".join(f"{name}={number}" for name, number in pairs)
        )
    if isinstance(rule, Address):
        return st.sampled_from(("127.0.0.1:9464", "0.0.0.0:0", "[::1]:65535", "node-1:80"))
    if isinstance(rule, HttpUrl):
        return st.sampled_from(("", "http://localhost:9093", "https://user:pass@alerts.example/prefix"))
    if isinstance(rule, BearerToken):
        return st.text(st.characters(min_codepoint=ord("!"), max_codepoint=ord("~")))
    assert isinstance(rule, Plain)
    return st.text(st.characters(exclude_categories=["Cc"]), min_size=int(rule.filled), max_size=20)


CONFIGS = st.fixed_dictionaries({}, optional={name: values_of(name) for name in DEFAULTS}).map(
    lambda values: Config(**values)
)


@given(CONFIGS)
def test_config_to_environment_to_config_is_the_identity(config: Config) -> None:
    """Settings handed to a child process by its environment are the settings of the parent."""
    assert Config.from_env(config.to_env()) == config


@given(CONFIGS, CONFIGS)
def test_resolving_a_config_with_itself_in_the_environment_changes_nothing(one: Config, two: Config) -> None:
    """Precedence is decided per field; a field that neither sets keeps its default."""
    resolved = resolve(one, environ=two.to_env()).config

    for name, default in DEFAULTS.items():
        first, second = getattr(one, name), getattr(two, name)
        assert getattr(resolved, name) == (first if first != default else second)


@given(st.text(st.characters(categories=["Lu", "Nd"], max_codepoint=127), min_size=1))
def test_an_unknown_name_with_our_prefix_is_always_reported(rest: str) -> None:
    """No misspelling goes unnoticed."""
    name = PREFIX + rest
    known = {PREFIX + setting.upper() for setting in DEFAULTS}

    if name not in known:
        [ignored] = settings_in({name: "1"})[1]
        assert name in ignored.problem


@given(st.dictionaries(st.sampled_from([PREFIX + name.upper() for name in DEFAULTS]), st.text(max_size=30)))
def test_no_text_in_the_environment_keeps_a_config_from_being_made(environ: dict[str, str]) -> None:
    """Whatever a variable holds, training starts."""
    resolved = resolve(environ=environ, folder=Path("/"))

    assert {one.name for one in resolved.origins.ignored} <= set(environ)
    assert all(one.problem.startswith(one.name) for one in resolved.origins.ignored)
