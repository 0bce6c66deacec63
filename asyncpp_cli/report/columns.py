"""The columns that people read: title and text of each, shared by all tables but those for machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncpp_cli.plain_text import printable
from asyncpp_cli.report.cells import Cell, Reached
from asyncpp_cli.report.names import value_text
from asyncpp_cli.report.statistics import Spread

NOTHING = "-"
NOT_REACHED = "not reached"

_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class Column:
    key: str
    """Of the number in the machines' records that it shows."""
    title: str
    """May have several lines."""
    text: Callable[[Cell], str]
    right: bool = True
    """Numbers stand at the right."""


def columns(cells: Sequence[Cell]) -> list[Column]:
    """The named keys, further keys in which these cells differ, then the measurements that there are."""
    every = [*key_columns(cells), *measured_columns(cells)]
    always = {*_NAMED, "status", "n", "val_loss"}
    return [
        column
        for column in every
        if column.key in always or any(column.text(cell) != NOTHING for cell in cells)
    ]


_NAMED: dict[str, tuple[str, Callable[[Cell], str]]] = {
    "schedule": ("schedule", lambda cell: printable(cell.schedule)),
    "optimizer": ("optimizer", lambda cell: printable(cell.optimizer)),
    "error_feedback": ("EF", lambda cell: _error_feedback(cell.error_feedback)),
    "model": ("model", lambda cell: printable(cell.model)),
}


def key_columns(cells: Sequence[Cell]) -> list[Column]:
    """What tells the cells apart, by the keys of `NAMED_KEYS` and of the cells' axes.

    Nothing stands where a cell does not use the setting, unless cells would look alike then.
    """
    named = [Column(key, title, text, right=False) for key, (title, text) in _NAMED.items()]
    further = list(cells[0].axes if cells else ())
    used = [*named, *(Column(key, _two_lines(key), _used(key), right=False) for key in further)]
    if len({tuple(column.text(cell) for column in used) for cell in cells}) == len(cells):
        return used
    return [*named, *(Column(key, _two_lines(key), _axis(key), right=False) for key in further)]


def measured_columns(cells: Sequence[Cell]) -> list[Column]:
    """How the cells stand and what they measured."""
    a_rank = "/process" if all(_device(cell) in (None, "cpu") for cell in cells) else "/GPU"
    return [
        Column("status", "status", status_text, right=False),
        Column("n", "n", runs_text),
        Column("val_loss", "val loss\nnats/tok.", lambda cell: _spread(cell.val_loss, "{:.3f}")),
        Column("bits_per_byte", "bits/\nbyte", lambda cell: _mean(cell.bits_per_byte, "{:.3f}")),
        Column(
            "unigram_bits_per_byte",
            "unigram\nb./byte",
            lambda cell: _number(cell.unigram_bits_per_byte, "{:.3f}"),
        ),
        Column("perplexity", "perplexity", lambda cell: _spread(cell.perplexity, "{:.2f}")),
        Column("gap", "gap\n(delayed\n- sync)", _gap_text(cells)),
        Column("recovered", "gap\nreco-\nvered", lambda cell: _number(cell.recovered, "{:.0%}")),
        *_target_columns(cells),
        Column("tokens_per_second", "tokens\n/s", lambda cell: _mean(cell.tokens_per_second, "{:,.0f}")),
        Column(
            "tokens_per_second_per_rank",
            f"tokens/s\n{a_rank}",
            lambda cell: _mean(cell.tokens_per_second_per_rank, "{:,.0f}"),
        ),
        Column("throughput_ratio", "× sync", lambda cell: _number(cell.throughput_ratio, "{:.2f}")),
        Column("mfu", "MFU", lambda cell: _mean(cell.utilisation, "{:.1%}")),
        Column("update_ratio", "updates\n× sync", _update_ratio(cells)),
        Column("delay", "delay\nsteps", lambda cell: NOTHING if cell.delay is None else str(cell.delay)),
        Column("bubble", "bubble\n(pred.)", _bubble_text),
        _memory_column(cells),
        Column("skipped_steps", "skipped\nsteps", lambda cell: str(cell.skipped_steps)),
        Column("restarts", "re-\nstarts", lambda cell: str(cell.restarts)),
    ]


def _target_columns(cells: Sequence[Cell]) -> list[Column]:
    target = next((cell.target for cell in cells if cell.target is not None), None)
    if target is None:
        return []
    return [
        Column("target_steps", f"steps\nto {target:g}", _reached_text("steps", "{:,.0f}")),
        Column("target_tokens", f"tokens\nto {target:g}", _reached_text("tokens", "{:,.0f}")),
        Column("target_seconds", f"seconds\nto {target:g}", _reached_text("seconds", "{:,.1f}")),
        Column(
            "target_time_ratio", "time\n× sync", lambda cell: _number(cell.time_to_target_ratio, "{:.2f}")
        ),
    ]


def _reached_text(name: str, form: str) -> Callable[[Cell], str]:
    def text(cell: Cell) -> str:
        reached: Reached | None = cell.reached
        if reached is None:
            return NOTHING
        if reached.runs == 0:
            return NOT_REACHED
        if reached.runs < reached.of:
            return f"{reached.runs}/{reached.of} reached"
        return _mean(getattr(reached, name), form)

    return text


def _two_lines(key: str) -> str:
    section, _, name = printable(key).rpartition(".")
    return f"{section}.\n{name}" if section else name


def _axis(key: str) -> Callable[[Cell], str]:
    def text(cell: Cell) -> str:
        value: Any = cell.axes[key]
        return NOTHING if value is None else printable(value_text(value))

    return text


def _used(key: str) -> Callable[[Cell], str]:
    text = _axis(key)
    return lambda cell: text(cell) if cell.uses(key) else NOTHING


def runs_text(cell: Cell) -> str:
    """How many runs are completed; of how many, if some are not."""
    return str(cell.n) if cell.n == len(cell.runs) else f"{cell.n}/{len(cell.runs)}"


def status_text(cell: Cell) -> str:
    """The cell's state, and how far it is while it runs."""
    if cell.state == "running" and cell.progress is not None:
        return f"running {cell.progress:.0%}"
    return cell.state


def _device(cell: Cell) -> Any:
    starts = [run.measurement.start for run in cell.runs]
    return next((start.get("device") for start in starts if start is not None), None)


def _error_feedback(coefficient: float) -> str:
    return {0.0: "off", 1.0: "on"}.get(coefficient, f"{coefficient:g}")


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def _mean(value: Spread | None, form: str) -> str:
    return NOTHING if value is None else form.format(value.mean)


def _spread(value: Spread | None, form: str) -> str:
    if value is None or value.std is None:
        return _mean(value, form)
    return f"{form.format(value.mean)}±{form.format(value.std)}"


def baselines(cells: Sequence[Cell]) -> set[int]:
    """Which of the cells others are compared with, by the identity of their runs."""
    return {id(cell.baseline.runs) for cell in cells if cell.baseline is not None}


def _gap_text(cells: Sequence[Cell]) -> Callable[[Cell], str]:
    compared_with = baselines(cells)

    def text(cell: Cell) -> str:
        if id(cell.runs) in compared_with:
            return "baseline"
        gap = _number(cell.gap, "{:+.3f}")
        if cell.gap_interval is not None:
            gap = f"{gap}±{cell.gap_interval.half_width:.3f}"
        paired = cell.gap_pairs
        # Of fewer runs than the loss beside it.
        return f"{gap} (n {len(paired.seeds)})" if paired is not None and paired.unpaired else gap

    return text


def _update_ratio(cells: Sequence[Cell]) -> Callable[[Cell], str]:
    """Nothing, unless some cell makes more or fewer updates than its counterpart on the same tokens."""
    differs = any(cell.update_ratio not in (None, 1.0) for cell in cells)
    return lambda cell: _number(cell.update_ratio, "{:g}") if differs else NOTHING


def _bubble_text(cell: Cell) -> str:
    if cell.bubble is None:
        return NOTHING
    measured = f"{cell.bubble.mean:.0%}"
    return measured if cell.bubble_predicted is None else f"{measured} ({cell.bubble_predicted:.0%})"


def _memory_column(cells: Sequence[Cell]) -> Column:
    """In MiB where no rank held a GiB."""
    largest = max((max(cell.peak_memory, default=0.0) for cell in cells), default=0.0)
    size, name, form = (_GIB, "GiB", "{:.2f}") if largest >= _GIB else (_MIB, "MiB", "{:.1f}")

    def text(cell: Cell) -> str:
        if not cell.peak_memory:
            return NOTHING
        low, high = (form.format(one / size) for one in (min(cell.peak_memory), max(cell.peak_memory)))
        return low if low == high else f"{low} to {high}"

    return Column("peak_memory_max", f"memory\n{name}\na rank", text)
