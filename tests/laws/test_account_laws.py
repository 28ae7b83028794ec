"""What holds for the account of any stream of edges, however it is sliced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_train.accounting.account import MOST_PASSES, ThreadAccount
from otel_train.accounting.batches import LOOKS_AHEAD, MOST_ITEMS
from otel_train.accounting.nesting import DEEPEST, MAY_SPREAD
from otel_train.accounting.steps import MOST_HELD
from otel_train.accounting.types import TRAIN, SourceTable
from otel_train.recording.events import Instrumented, Op, SourceKind, code
from tests.support.edges import Book, Tape, account_for, phase_name

SOURCES = [Instrumented(kind, kind.name.lower()) for kind in SourceKind]
SOURCES += [
    Instrumented(SourceKind.DATA, "val"),
    Instrumented(SourceKind.OPTIMIZER, "D"),
    Instrumented(SourceKind.FORWARD, "teacher"),
    Instrumented(SourceKind.STAGE, "outer"),
    Instrumented(SourceKind.DATA, "given", "test"),
]

garbage = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.builds(
            code,
            st.sampled_from([*Op, Op.BEGIN, Op.BEGIN, Op.END, Op.END]),
            st.integers(0, len(SOURCES) - 1),
            st.integers(0, 3),
            st.sampled_from([0, 0, 0, 1, 5, 6]),
        ),
    ),
    max_size=60,
)
"""(nanoseconds since the edge before, code): any order, nesting or loss."""

ACTIONS = {
    "ask": lambda t: t.ask(samples=4),
    "ask other": lambda t: t.ask("prose"),
    "ask val": lambda t: t.ask("val"),
    "stop": lambda t: t.stop(),
    "stop val": lambda t: t.stop("val"),
    "failed ask": lambda t: t.ask(op=Op.FAIL),
    "forward": lambda t: t.forward(),
    "eval forward": lambda t: t.forward(11, flags=0),
    "backward": lambda t: t.backward(),
    "update": lambda t: t.update(),
    "update D": lambda t: t.update(9, "D"),
    "raise in update": lambda t: t.begin(SourceKind.OPTIMIZER, "SGD").spend(3).ask(),
    "closure": lambda t: (
        t.begin(SourceKind.OPTIMIZER, "SGD").spend(1).forward().backward().end(SourceKind.OPTIMIZER, "SGD")
    ),
    "nested update": lambda t: (
        t.begin(SourceKind.OPTIMIZER, "SAM").spend(1).update(2).end(SourceKind.OPTIMIZER, "SAM")
    ),
    "scaler": lambda t: (
        t.begin(SourceKind.SCALER, "scaler").spend(1).update(2).end(SourceKind.SCALER, "scaler")
    ),
    "checkpoint": lambda t: t.run(SourceKind.CHECKPOINT, "checkpoint", 40),
    "stage": lambda t: t.begin(SourceKind.STAGE, "mine").spend(2).forward(3).end(SourceKind.STAGE, "mine"),
    "suspend": lambda t: t.piece("async", 4, Op.SUSPEND, 7),
    "resume": lambda t: t.piece("async", 4, Op.END, 7),
    "gap": lambda t: t.spend(13),
    "epoch": lambda t: t.epoch(3),
    "epoch over": lambda t: t.epoch_over(),
    "report": lambda t: t.report(1),
    "new pass": lambda t: t.ask("code", iterator=7).ask("code", iterator=8),
    "ask of a pass": lambda t: t.ask("code", iterator=7),
    "stop of a pass": lambda t: t.stop("code", iterator=7),
    "break": lambda t: t.ask("code", iterator=9).forward().dispose("code", 9),
    "dispose": lambda t: t.dispose("code", 7),
    "start": lambda t: t.start("val"),
    "train ahead": lambda t: t.ask("code", iterator=7).ask("val", iterator=3).forward(11, flags=0),
    "frozen": lambda t: t.forward(11, flags=1),
    "grad": lambda t: t.run(SourceKind.GRAD, "grad", 4),
    "whole": lambda t: t.run(SourceKind.WHOLE, "make_step", 9),
    "mark": lambda t: t.mark(),
    "loader in loader": lambda t: (
        t.begin(SourceKind.DATA, "outer").spend(1).ask("inner").end(SourceKind.DATA, "outer")
    ),
}
actions = st.lists(st.sampled_from(sorted(ACTIONS)), max_size=40)
TRAINING_ACTIONS = ("ask", "forward", "backward", "update", "update D", "gap", "epoch", "report")


def program(names: Sequence[str]) -> Tape:
    """What a loop that does these things one after the other would write."""
    tape = Tape(started_ns=100)
    tape.micro().update()  # decides what steps are counted by
    for name in names:
        ACTIONS[name](tape)
    return tape


def raw(pairs: Sequence[tuple[int, int]]) -> Tape:
    """A tape of any edges."""
    tape = Tape(started_ns=50)
    tape.sources = list(SOURCES)
    for gap, word in pairs:
        tape.spend(gap)
        tape.times.append(tape.now_ns)
        tape.codes.append(word)
    return tape


def cuts_of(tape: Tape, fractions: Sequence[float]) -> list[int]:
    """Places to slice at."""
    return sorted(round(f * len(tape.times)) for f in fractions)


def assert_everything_is_accounted_for(book: Book, tape: Tape, ended_ns: int) -> None:
    rows = list(book.times())
    wall_ns = ended_ns - tape.started_ns
    assert_open_time_is_with_its_calls(book)
    assert sum(row.self_ns for row in rows) == wall_ns
    assert sum(book.self_ns("activity").values()) == wall_ns
    steps = book.steps()
    of_steps = sum(step.duration_ns for step in steps if step.phase == "train")
    asks_for_nothing = sum(row.self_ns for row in rows if row.phase == TRAIN) - of_steps
    waits = sum(r.self_ns for r in rows if r.phase == TRAIN and book.kind(r.source) is SourceKind.DATA)
    # With the time of a model that runs inside an ask.
    asks = sum(r.inclusive_ns for r in rows if r.phase == TRAIN and book.kind(r.source) is SourceKind.DATA)
    assert 0 <= asks_for_nothing <= asks
    assert waits == book.self_ns("activity").get("data_wait", 0)
    assert all(step.ended_ns - step.started_ns >= step.duration_ns >= 0 for step in steps)
    counted = [step.ended_ns for step in steps if step.counted and step.phase == "train"]
    assert counted == sorted(counted)
    assert all(call.step < len(steps) for call in book.calls())


def assert_open_time_is_with_its_calls(book: Book) -> None:
    """All time in which a call was open that may lie in several batches is in one row; of the others, own time is where it was."""
    selves, open_ns, called_ns = Counter[object](), Counter[object](), Counter[object]()
    stages = set()
    for row in book.times():
        assert row.self_ns >= 0
        if row.source >= 0:
            name = book.name(row.source)
            key: object = name, phase_name(row.phase), book.name(row.loader)
            open_ns[key] += row.inclusive_ns
            kind = book.kind(row.source)
            if kind is not None and MAY_SPREAD >> kind & 1:
                stages.add(name)
                key = name
                open_ns[name] += row.inclusive_ns
            selves[key] += row.self_ns
    for call in book.calls():
        if call.source in stages:
            called_ns[call.source, call.phase, call.loader] += call.inclusive_ns
    assert all(ns >= 0 for ns in open_ns.values())
    assert all(ns <= open_ns[key] for key, ns in selves.items())
    assert all(ns <= open_ns[key] for key, ns in called_ns.items())


def held(account: ThreadAccount) -> int:
    """Edges and items that are not final yet."""
    return sum(map(len, account._batches.pending)) + len(account._held)


fractions = st.lists(st.floats(0, 1), max_size=6)


@settings(deadline=None, max_examples=300)
@given(garbage, fractions, st.integers(0, 5))
@example([(0, 1), (0, 4), (0, 113), (1, 17), (0, 209), (0, 1), (0, 118)], [], 0)
def test_every_instant_has_one_owner_whatever_was_written(
    pairs: list[tuple[int, int]], at: list[float], tail: int
) -> None:
    """Hooks get lost, raise and nest in unforeseen ways; the parts must still add up."""
    tape = raw(pairs)

    book = account_for(tape, cuts_of(tape, at), ended_ns=tape.now_ns + tail)

    assert_everything_is_accounted_for(book, tape, tape.now_ns + tail)


@settings(deadline=None, max_examples=200)
@given(actions)
def test_what_ran_inside_is_part_of_what_ran_around_it(names: list[str]) -> None:
    """Inclusive time is what the histogram shows: less than the self time would be nonsense."""
    tape = program([*names, "ask"])

    book = account_for(tape)

    assert all(call.inclusive_ns >= 0 for call in book.calls())
    inclusive = book.inclusive_ns()
    selves = book.self_ns("owner")
    for name in ("model", "backward", "SGD", "SAM", "D", "mine", "scaler", "checkpoint"):
        assert inclusive[name] >= selves.get(name, 0)


@settings(deadline=None, max_examples=200)
@given(garbage)
def test_no_more_calls_than_begins(pairs: list[tuple[int, int]]) -> None:
    """An occurrence counted twice would double its stage."""
    tape = raw(pairs)

    begins = Counter(word >> 4 & 0xFFF for word in tape.codes if word & 15 in (Op.BEGIN, Op.RESUME))
    calls = Counter(call.source for call in account_for(tape).calls())

    assert all(calls[source.name] <= begins[number] for number, source in enumerate(SOURCES))


@settings(deadline=None, max_examples=400)
@given(actions, fractions)
@example(["train ahead", "ask of a pass", "gap", "stop"], [])
@example(["start", "ask of a pass", "ask val"], [])
@example(["ask", "ask", "ask", "gap", "ask"], [])
def test_the_account_does_not_depend_on_how_it_was_sliced(names: list[str], at: list[float]) -> None:
    """The export loop wakes when it can."""
    tape = program(names)
    whole, sliced = account_for(tape), account_for(tape, cuts_of(tape, at))

    assert sorted(sliced.steps()) == sorted(whole.steps())
    assert sorted(call[:-1] for call in sliced.calls()) == sorted(call[:-1] for call in whole.calls())
    for by in ("owner", "loader", "phase", "activity"):
        assert sliced.self_ns(by) == whole.self_ns(by)
    assert {name: sorted(batches) for name, batches in sliced.batches().items()} == {
        name: sorted(batches) for name, batches in whole.batches().items()
    }
    assert (sliced.updates, sliced.skipped_updates) == (whole.updates, whole.skipped_updates)
    assert sliced.said == whole.said
    assert_everything_is_accounted_for(sliced, tape, tape.now_ns)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(TRAINING_ACTIONS), max_size=40), fractions)
def test_steps_close_where_the_design_says(names: list[str], at: list[float]) -> None:
    """DESIGN's rule, written once more as a loop over what happened: how many steps, and when each began."""
    tape = program(names)

    book = account_for(tape, cuts_of(tape, at))

    assert sum(step.counted for step in book.steps("train")) == closings(tape)


def closings(tape: Tape) -> int:
    """Steps that close: at an ask or a word of the program after an update, or before an optimizer comes again."""
    closed = 0
    updated: list[str] = []
    for word in tape.codes:
        op, source = word & 15, tape.sources[word >> 4 & 0xFFF]
        if updated and (op in (Op.EPOCH, Op.REPORT) or (source.kind is SourceKind.DATA and op == Op.BEGIN)):
            closed += 1
            updated.clear()
        elif source.kind is SourceKind.OPTIMIZER and op == Op.END:
            if updated and source.name in (updated[0], updated[-1]):
                closed += 1
                updated.clear()
            updated.append(source.name)
    return closed + bool(updated)


@settings(deadline=None, max_examples=200)
@given(actions, st.sampled_from(["epoch", "report"]), actions)
def test_a_word_of_the_program_takes_no_time_from_any_stage(
    before: list[str], said: str, after: list[str]
) -> None:
    """It says where one is, and is no stage."""
    bare, marked = program([*before, *after]), program([*before, said, *after])

    assert account_for(marked).self_ns("owner") == account_for(bare).self_ns("owner")
    assert account_for(marked).count() == account_for(bare).count()


@settings(deadline=None, max_examples=100)
@given(actions, fractions)
def test_a_stage_inside_itself_is_counted_once(names: list[str], at: list[float]) -> None:
    """Counting the inner call again would double the time."""
    tape = program([])
    tape.begin(SourceKind.STAGE, "fit")
    for name in names:
        ACTIONS[name](tape)
    tape.end(SourceKind.STAGE, "fit")

    calls = account_for(tape, cuts_of(tape, at)).calls("fit")

    assert len(calls) == 1


@settings(deadline=None, max_examples=50)
@given(garbage, st.integers(3, 8))
def test_nothing_grows_with_the_run(pairs: list[tuple[int, int]], rounds: int) -> None:
    """A run of weeks has the memory of a run of minutes."""
    tape = raw(pairs * 40)
    account = ThreadAccount(tape.started_ns, SourceTable().extend(tape.sources))
    for turn in range(rounds):
        account.feed([at + turn * tape.now_ns for at in tape.times], tape.codes)
        account.take()

        assert len(account.open) <= DEEPEST
        assert held(account) <= MOST_HELD + MOST_ITEMS + len(tape.times) * (LOOKS_AHEAD + 1) + MOST_PASSES


@pytest.mark.parametrize("what", ["forward", "eval forward", "stage", "start", "new pass"])
def test_a_loop_that_meets_no_boundary_does_not_wait_for_ever(what: str) -> None:
    """A server evaluates for weeks without a loader."""
    tape = program([what] * MOST_ITEMS)
    account = ThreadAccount(tape.started_ns, SourceTable().extend(tape.sources))

    account.feed(tape.times, tape.codes)

    assert held(account) <= MOST_HELD + MOST_ITEMS
    assert_everything_is_accounted_for(
        Book(tape.sources, [account.take(), account.close(tape.now_ns)]), tape, tape.now_ns
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 9), st.booleans()), max_size=30))
def test_blocks_of_coroutines_that_take_turns_last_as_long_as_each_is_open(
    turns: list[tuple[int, bool, int, bool]],
) -> None:
    """Blocks nest within a coroutine, and not among several. In between the program trains."""
    tape = program(())
    blocks: dict[int, list[tuple[str, int]]] = {}
    expected: list[tuple[str, int, int]] = []
    for number, (task, ends, ns, trains) in enumerate(turns):
        mine = blocks.setdefault(task, [])
        if ends and mine:
            name, begun_ns = mine.pop()
            tape.end(SourceKind.STAGE, name)
            expected.append((name, begun_ns, tape.now_ns - begun_ns))
        else:
            mine.append((f"block {number}", tape.now_ns))
            tape.begin(SourceKind.STAGE, mine[-1][0])
        tape.spend(ns)
        if trains:
            tape.step()

    book = account_for(tape)

    ended = {name for name, *_ in expected}
    calls = [call for call in book.calls() if call.source in ended]
    assert sorted((c.source, c.started_ns, c.inclusive_ns) for c in calls) == sorted(expected)
    assert not any(call.failed for call in book.calls())
    assert_everything_is_accounted_for(book, tape, tape.now_ns)
