"""The columns of a report. Adding one takes a line in `measured_columns`; all formats follow.

A number that no run's `Measurement` has yet is computed in `report.load.measure`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from asyncpp_cli.base.console import printable
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.report.analysis.cells import CellResult, memory_unit, value_text
from asyncpp_cli.report.analysis.conditions import conditions
from asyncpp_cli.report.analysis.statistics import (
    CANNOT_BE_TOLD,
    CONFIDENCE,
    MOST_FACTOR,
    Pairs,
    Spread,
    exp,
    ratio_text,
)
from asyncpp_cli.report.tables.column import (
    ENDS,
    MEAN,
    NOTHING,
    Column,
    Text,
    Value,
    averaged,
    formatted,
    part_of,
    single,
    with_half,
)
from schedules import KNOWN
from stages.config.keys import unknown

NOT_REACHED = "not reached"


def columns(cells: Sequence[CellResult]) -> list[Column]:
    """All columns, in order: what tells the cells apart, then what was measured."""
    return [*key_columns(cells), *measured_columns(cells)]


def shown_columns(cells: Sequence[CellResult]) -> list[Column]:
    """The columns of a table: those with a title that have a value in some cell."""
    return [
        column
        for column in columns(cells)
        if column.always or (column.title and any(column.text(cell) != NOTHING for cell in cells))
    ]


def meaning(texts: Sequence[str]) -> str:
    """What intervals in the texts of a table mean; empty without any."""
    level = f"{CONFIDENCE:.0%} interval"
    halves = (
        f"± is half of a {level}: of a loss, of its mean over seeds (Student's t); of a gap, of the mean "
        "difference between runs with the same seed"
    )
    ends = f"[low, high] is a {level}, from logarithms"
    untold = f'"{CANNOT_BE_TOLD}": it spans more than a factor of {MOST_FACTOR:g}'
    marks = (("±", halves), ("[", ends), (CANNOT_BE_TOLD, untold))
    return "".join(f"{said}. " for mark, said in marks if any(mark in text for text in texts)).strip()


def value_columns(names: str, cells: Sequence[CellResult]) -> list[Column]:
    """The measured columns with these keys, separated by commas.

    Raises:
        UserError: a key is unknown.
    """
    known = {column.key: column for column in measured_columns(cells) if column.title}
    keys = [key.strip() for key in names.split(",") if key.strip()]
    for key in keys:
        if key not in known:
            raise UserError(f"--value: {unknown(key, known)}")
    return [known[key] for key in keys]


def records(cells: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Each cell's values by field; None for an unknown or infinite number."""
    every_column = columns(cells)
    return [
        {name: value for column in every_column for name, value in column.record(cell).items()}
        for cell in cells
    ]


def measured_columns(cells: Sequence[CellResult]) -> list[Column]:
    """The state of the cells, and what was measured."""
    all_on_cpu = all(_device(cell) in (None, "cpu") for cell in cells)
    per_rank_title = f"tokens/s\n{'/process' if all_on_cpu else '/GPU'}"
    return [
        _word("status", "status", status_text, attrgetter("state"), share=7),
        single("progress"),
        single("reason", value=lambda cell: "; ".join(cell.reasons) or None),
        single("n", "n", text=runs_text, always=True, share=8),
        _loss_column(),
        _schedule_of("loss_of"),
        averaged("val_loss_error", form="{:.3f}"),
        averaged("bits_per_byte", "bits/\nbyte", form="{:.3f}", hide=16),
        single("unigram_bits_per_byte", "unigram\nbits/byte", form="{:.3f}", share=3, hide=11, extra=True),
        averaged(
            "perplexity", "perplexity", _perplexity, form="{:.2f}", show_interval=True, hide=4, extra=True
        ),
        _gap_column(cells),
        averaged("val_loss_ema", "EMA\nval loss", form="{:.3f}", show_interval=True, hide=24),
        _pairs_column("gap_ema", "EMA\ngap", lambda cell: cell.compared(attrgetter("val_loss_ema")), hide=25),
        *_reference_columns(cells),
        *_set_columns(cells),
        single(
            "gap_welch", value=attrgetter("gap_pairs.interval_welch"), parts={"_low": "low", "_high": "high"}
        ),
        single("gap_seeds", value=attrgetter("gap_pairs.seeds")),
        single("gap_seeds_missing", value=lambda cell: list(cell.gap_pairs.unpaired)),
        _update_ratio_column(cells),
        _schedule_of("baseline"),
        _schedule_of("fastest", key="fastest_synchronous"),
        single("recovered", "gap\nclosed", form="{:.0%}", hide=17),
        *_target_columns(cells),
        _speed_column(),
        averaged("tokens_per_second_per_rank", per_rank_title, form="{:,.0f}", hide=5, extra=True),
        _speedup_column(),
        single("throughput_bound"),
        averaged("mfu", "MFU", form="{:.1%}", hide=15),
        single("delay", "delay\nsteps", share=9),
        averaged("bubble", "bubble\n(pred.)", form="{:.0%}", text=_bubble_text, secondary=True),
        single("bubble_predicted"),
        single("busy_by_rank"),
        # In the least even run: the rank that others wait for, the slowest of processes with the same work.
        single(
            "slowest",
            value=attrgetter("least_even"),
            parts={"_run": "id"}
            | {f"_{name}": f"slowest.{name}" for name in ("rank", "ratio", "peer", "peer_ratio", "host")},
        ),
        single("peak_memory_min", value=lambda cell: min(cell.peak_memory, default=None)),
        _memory_column(cells),
        single("peak_memory_by_rank", value=attrgetter("peak_memory")),
        averaged("load_max_over_mean", "load\nmax/mean", form="{:.2f}", show_interval=True, hide=19),
        averaged("load_entropy", form="{:.3f}"),
        averaged("experts_never_chosen", form="{:g}"),
        single("load_by_block"),
        averaged("first_step_seconds", form="{:.3g}"),
        _counted("skipped_steps", "skipped\nsteps", share=1, hide=12),
        _counted("restarts", "restarts", share=2, hide=13),
        _cost_column("gpu_hours", "GPU-h", hide=-2),
        _cost_column("core_hours", "core-h", hide=-1),
        single("runs", value=lambda cell: [run.id for run in cell.runs]),
        single("continues", value=_lineages),
        single("conditions", value=_conditions),
    ]


def _perplexity(cell: CellResult) -> Spread | None:
    return cell.spread(lambda run: None if run.val_loss is None else exp(run.val_loss))


def _counted(name: str, title: str, **how: Any) -> Column:
    """The sum over all runs of a cell."""
    return single(name, title, lambda cell: sum(getattr(run, name) for run in cell.runs), extra=True, **how)


def _schedule_of(other: str, *, key: str = "") -> Column:
    """The schedule of another cell that this one names."""
    return single(key or other, value=attrgetter(other), parts={"": "schedule"})


def _lineages(cell: CellResult) -> list[str]:
    return [f"{run.id} {run.lineage.text}" for run in cell.runs if run.lineage is not None]


def _cost_column(name: str, title: str, *, hide: int) -> Column:
    def text(cell: CellResult) -> str:
        return formatted(getattr(cell.cost, name, None) or None, "{:.3g}")

    return single(name, title, attrgetter("cost"), parts={"": name}, text=text, hide=hide)


def _target_columns(cells: Sequence[CellResult]) -> list[Column]:
    """Steps, tokens and time to the target loss, if one was given."""
    target = next((cell.target for cell in cells if cell.target is not None), None)
    if target is None:
        return []

    def reached(name: str, form: str, **options: Any) -> Column:
        def text(cell: CellResult) -> str:
            if cell.reached is None:
                return NOTHING
            if cell.reached.runs == 0:
                return NOT_REACHED
            if cell.reached.runs < cell.reached.of:
                return f"{cell.reached.runs}/{cell.reached.of} reached"
            return formatted(part_of(cell.reached, f"{name}.mean"), form)

        parts = {"": f"{name}.mean"}
        title = f"{name}\nto {target:g}"
        return single(f"target_{name}", title, attrgetter("reached"), parts=parts, text=text, **options)

    return [
        single("target"),
        single("target_reached", value=attrgetter("reached"), parts={"": "runs"}),
        reached("steps", "{:,.0f}"),
        reached("tokens", "{:,.0f}", hide=18),
        reached("seconds", "{:,.1f}"),
        single("target_time_ratio", "time\n× sync", attrgetter("time_to_target_ratio"), form="{:.2f}"),
    ]


def _gap_column(cells: Sequence[CellResult]) -> Column:
    compared_with = {cell.baseline for cell in cells}

    def text(cell: CellResult) -> str:
        return "baseline" if cell in compared_with else _gap_text(cell.gap_pairs)

    return _pairs_column("gap", "gap\n(delayed\n- sync)", attrgetter("gap_pairs"), text=text)


def _gap_text(pairs: Pairs) -> str:
    gap = with_half(formatted(pairs.mean, "{:+.3f}"), pairs.interval, "{:.3f}")
    # Over fewer runs than the loss beside it.
    return f"{gap} (n {len(pairs.seeds)})" if pairs.unpaired else gap


def _pairs_column(key: str, title: str, compared: Callable[[CellResult], Pairs], **options: Any) -> Column:
    """A gap over seeds, with its interval."""
    usual = {"text": lambda cell: _gap_text(compared(cell))}
    return single(key, title, compared, parts={"": "mean"} | ENDS, **usual | options)


def _reference_columns(cells: Sequence[CellResult]) -> list[Column]:
    """Loss minus that of the arm that `--against` names, if it names one."""
    reference = next((cell.reference for cell in cells if cell.reference is not None), None)
    if reference is None:
        return []

    def text(cell: CellResult) -> str:
        return "reference" if cell.reference is None else _gap_text(cell.reference_pairs)

    return [
        _pairs_column("against", f"minus\n{reference.name}", attrgetter("reference_pairs"), text=text),
        single("reference", value=lambda _: reference.name),
    ]


def _set_columns(cells: Sequence[CellResult]) -> list[Column]:
    """Loss, bits per byte and gap of each validation set, where there are several."""
    headlines = {cell.value("data.headline") for cell in cells}
    names = dict.fromkeys(name for cell in cells for name in cell.sets)
    # The columns of the headline itself have no prefix.
    return [
        column
        for name in names
        for column in _columns_of_set(name, title="" if headlines == {name} else name)
    ]


def _columns_of_set(name: str, *, title: str) -> list[Column]:
    def averaged_over_seeds(field: str, heading: str = "", **options: Any) -> Column:
        def value(cell: CellResult) -> Spread | None:
            return cell.spread(lambda run: run.of_set(name, field))

        return averaged(f"{name}.{field}", title and heading and f"{title}\n{heading}", value, **options)

    gap = _pairs_column(
        f"{name}.gap",
        title and f"{title}\ngap",
        lambda cell: cell.compared(lambda run: run.of_set(name, "val_loss")),
    )
    return [
        averaged_over_seeds("val_loss", "val loss", form="{:.3f}", show_interval=True),
        averaged_over_seeds("val_loss_error", form="{:.3f}"),
        averaged_over_seeds("val_loss_ema", form="{:.3f}"),
        averaged_over_seeds("bits_per_byte", "bits/byte", form="{:.3f}", hide=22),
        gap,
    ]


def _loss_column() -> Column:
    """The loss; of a cell run for its speed alone, the schedule whose loss is its own, too."""
    column = averaged("val_loss", "val loss\nnats/tok.", form="{:.3f}", show_interval=True, always=True)

    def text(cell: CellResult) -> str:
        if not cell.speed_only:
            return column.text(cell)
        return f"as {cell.loss_of.schedule}" if cell.loss_of is not None else NOTHING

    return replace(column, own_text=text)


def _speed_column() -> Column:
    """Tokens per second; in records with the deviation over segments and seeds, too."""
    parts = {f"{end}": f"tokens_per_second.{name}" for end, name in MEAN.items()}
    parts |= {
        "_std_over_segments": "speed_deviation",
        "_low": "speed_interval.low",
        "_high": "speed_interval.high",
    }

    def text(cell: CellResult) -> str:
        return formatted(part_of(cell.tokens_per_second, "mean"), "{:,.0f}")

    return single(
        "tokens_per_second", "tokens\n/s", lambda cell: cell, parts=parts, text=text, secondary=True
    )


def _speedup_column() -> Column:
    """The ratio with its interval, and the bound where it is above it."""
    parts = {"": "throughput_ratio", "_low": "throughput_interval.low", "_high": "throughput_interval.high"}

    def text(cell: CellResult) -> str:
        shown = ratio_text(cell.throughput_ratio, cell.throughput_interval) or NOTHING
        return f"{shown} (max {cell.throughput_bound:.2f})" if cell.is_too_fast else shown

    return single("throughput_ratio", "× sync", lambda cell: cell, parts=parts, text=text, secondary=True)


def _update_ratio_column(cells: Sequence[CellResult]) -> Column:
    """Shown if some cell makes more or fewer updates than its counterpart on the same tokens."""
    differs = any(cell.update_ratio not in (None, 1.0) for cell in cells)

    def text(cell: CellResult) -> str:
        return formatted(cell.update_ratio, "{:g}") if differs else NOTHING

    return single("update_ratio", "updates\n× sync", text=text)


def _memory_column(cells: Sequence[CellResult]) -> Column:
    """Peak memory of the ranks."""
    size, unit = memory_unit(cells)
    form = "{:.2f}" if unit == "GiB" else "{:.1f}"

    def text(cell: CellResult) -> str:
        if not cell.peak_memory:
            return NOTHING
        low, high = (form.format(held / size) for held in (min(cell.peak_memory), max(cell.peak_memory)))
        return low if low == high else f"{low} to {high}"

    return single(
        "peak_memory_max",
        f"memory\n{unit}\nper rank",
        lambda cell: max(cell.peak_memory, default=None),
        text=text,
        share=10,
        hide=14,
    )


def _bubble_text(cell: CellResult) -> str:
    if cell.bubble is None:
        return NOTHING
    measured = f"{cell.bubble.mean:.0%}"
    if cell.schedule in KNOWN and KNOWN[cell.schedule].sharded:
        return f"{measured} exchanges"
    return measured if cell.bubble_predicted is None else f"{measured} ({cell.bubble_predicted:.0%})"


def runs_text(cell: CellResult) -> str:
    """The number of completed runs; of how many, if some are not."""
    return str(cell.n) if cell.n == len(cell.runs) else f"{cell.n}/{len(cell.runs)}"


def status_text(cell: CellResult) -> str:
    """The cell's state, with its progress while it runs."""
    if cell.state == "running" and cell.progress is not None:
        return f"running {cell.progress:.0%}"
    return cell.state


def _device(cell: CellResult) -> Any:
    starts = [run.start for run in cell.runs]
    return next((start.device for start in starts if start is not None), None)


def _conditions(cell: CellResult) -> dict[str, Any]:
    """Each condition's value; a list where the cell's runs differ, None where it is unknown."""
    return {
        name: values[0] if len(values) == 1 else values or None
        for name, values in conditions(cell.runs).items()
    }


def key_columns(cells: Sequence[CellResult]) -> list[Column]:
    """Schedule, optimizer, error feedback, model, and further keys in which the cells differ.

    A setting that a cell does not use is left blank, unless cells would look alike then.
    """
    named = [
        _word("schedule", "schedule", lambda cell: printable(cell.schedule)),
        _word("optimizer", "optimizer", lambda cell: printable(cell.optimizer)),
        _word("error_feedback", "EF", lambda cell: _on_or_off(cell.error_feedback)),
        _word("model", "model", lambda cell: printable(cell.model), share=6),
    ]
    keys = list(cells[0].axes if cells else ())
    used = [*named, *(_axis(key, only_used=True) for key in keys)]
    if len({tuple(column.text(cell) for column in used) for cell in cells}) == len(cells):
        return used
    return [*named, *(_axis(key, only_used=False) for key in keys)]


def _word(key: str, title: str, text: Text, value: Value | None = None, **how: Any) -> Column:
    return single(key, title, value, text=text, right=False, always=True, **how)


def _axis(key: str, *, only_used: bool) -> Column:
    def text(cell: CellResult) -> str:
        value = cell.axes[key]
        return (
            NOTHING if value is None or (only_used and not cell.uses(key)) else printable(value_text(value))
        )

    return single(key, printable(key), lambda cell: cell.axes[key], text=text, right=False)


def _on_or_off(coefficient: float) -> str:
    return {0.0: "off", 1.0: "on"}.get(coefficient, f"{coefficient:g}")
