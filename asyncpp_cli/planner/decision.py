"""Where asynchrony saves time: the best layouts by delay, over numbers of GPUs and tokens per step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from typing import Any

import schedules
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.base.progress import shown
from asyncpp_cli.base.worker import exit_with_parent
from asyncpp_cli.planner.estimate import Estimate, losses
from asyncpp_cli.planner.fsdp import Sharded, best_sharded
from asyncpp_cli.planner.layouts import CONSIDERED
from asyncpp_cli.planner.rank import best_first, delay_of
from asyncpp_cli.planner.shared import CostModel, Shared
from stages.config.run_config import RunConfig

KINDS = ("synchronous", "delay 1", "more delay")
"""Kinds of layouts that are told apart: their weights take different numbers of steps to a loss."""
ROWS = 6
"""Numbers of GPUs of a map."""
TOKENS = (0.5, 1, 2, 4)
"""Tokens per step of a map, over those of the run."""
LARGER_BATCH = 2
"""Tokens per step of the third choice, over those of the point."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best layout of a kind."""

    layout: Estimate | Sharded

    @cached_property
    def losses(self) -> dict[str, float]:
        """Shares of the step that it loses, as `losses` in `asyncpp_cli.planner.estimate` has them; of FSDP
        what its exchanges cost (`network`)."""
        return losses(self.layout) if isinstance(self.layout, Estimate) else {"network": self.layout.lost}

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.layout.step.seconds

    @property
    def limit(self) -> str:
        """What the step loses most to."""
        return max(self.losses, key=lambda name: self.losses[name])


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best layouts of so many GPUs and tokens per step; None: none fits."""

    gpus: int
    tokens_per_step: int
    best: dict[str, Best | None]
    """The best pipeline of each of `KINDS`; None: none fits."""
    sharded: Best | None
    """FSDP or HSDP; None as well where links are not known."""
    larger_batch: Best | None
    """The best synchronous layout at `LARGER_BATCH` times the tokens per step, FSDP among them."""

    @property
    def synchronous(self) -> Best | None:
        """The best synchronous layout, pipeline or not."""
        return faster(self.best["synchronous"], self.sharded)

    @property
    def fastest(self) -> str | None:
        """Kind of the layout with the shortest step: one of `KINDS`, or the name of FSDP or HSDP."""
        found = {kind: best for kind, best in self.best.items() if best is not None}
        if self.sharded is not None:
            found[self.sharded.layout.name.partition(",")[0]] = self.sharded
        return min(found, key=lambda kind: found[kind].seconds, default=None)

    def ratio(self, kind: str) -> float | None:
        """Time of the best synchronous step over that of the best pipeline of a kind."""
        synchronous, other = self.synchronous, self.best[kind]
        if synchronous is None or other is None:
            return None
        return synchronous.seconds / other.seconds

    @cached_property
    def larger_batch_ratio(self) -> float | None:
        """Tokens per second at the larger synchronous batch, over those at the point's own."""
        synchronous = self.synchronous
        if synchronous is None or self.larger_batch is None:
            return None
        return self.larger_batch.layout.tokens_per_second / synchronous.layout.tokens_per_second


def faster(one: Best | None, other: Best | None) -> Best | None:
    """The one with the shorter step."""
    return min(
        (best for best in (one, other) if best is not None), key=lambda best: best.seconds, default=None
    )


def sharded_best(
    base: RunConfig, *, gpus: int, tokens_per_step: int, costs: CostModel, limit_gb: float
) -> Best | None:
    """The faster one of FSDP and HSDP, if one fits and links are known."""
    found = best_sharded(base, gpus=gpus, tokens_per_step=tokens_per_step, costs=costs, limit_gb=limit_gb)
    return Best(layout=found[0]) if found else None


def decision_map(
    base: RunConfig,
    *,
    gpus: int,
    tokens_per_step: Sequence[int],
    costs: CostModel,
    limit_gb: float,
    names: Collection[str] = CONSIDERED,
    with_sharded: bool = True,
    processes: int = 1,
) -> list[Point]:
    """The points of powers of two of GPUs up to `gpus`, the `ROWS` largest, times `tokens_per_step`.

    Args:
        base: the run.
        gpus: at least 2.
        tokens_per_step: of the columns.
        costs: of the model's parts.
        limit_gb: memory of a GPU, 10^9 bytes.
        names: schedules to consider.
        with_sharded: consider FSDP and HSDP, too.
        processes: that plan at a time, each the points of one number of GPUs.

    Raises:
        UserError: no point has a layout.
    """
    counts = [2**power for power in range(1, gpus.bit_length()) if 2**power <= gpus][-ROWS:]
    points_of = partial(
        _points,
        base,
        tokens_per_step=tokens_per_step,
        costs=costs,
        limit_gb=limit_gb,
        names=list(names),
        with_sharded=with_sharded,
    )
    points, refusal = [], None
    with ExitStack() as opened:
        advance = opened.enter_context(shown("comparing layouts", total=len(counts)))
        planned: Iterator[tuple[list[Point], UserError | None]] = map(points_of, counts)
        if min(processes, len(counts)) > 1:
            pool = get_context("spawn").Pool(min(processes, len(counts)), _start_worker)
            # The most GPUs take longest.
            planned = opened.enter_context(pool).imap(points_of, reversed(counts))
        for of_count, refused in planned:
            points += of_count
            refusal = refused or refusal
            advance(1)
    if refusal is not None and not any(point.fastest for point in points):
        raise refusal
    return sorted(points, key=lambda point: (point.tokens_per_step, point.gpus))


def _start_worker() -> None:
    # Ctrl-C is the parent's alone, which then ends the others.
    signal(SIGINT, SIG_IGN)
    exit_with_parent()


def _points(
    base: RunConfig,
    gpus: int,
    *,
    tokens_per_step: Sequence[int],
    costs: CostModel,
    limit_gb: float,
    names: Collection[str],
    with_sharded: bool,
) -> tuple[list[Point], UserError | None]:
    """The points of a number of GPUs, and why one of them has no layout."""
    known: dict[tuple[int, bool], dict[str, Best | None]] = {}
    refusal: UserError | None = None
    shared = Shared(costs)

    def best(tokens: int, *, synchronous_alone: bool) -> dict[str, Best | None]:
        nonlocal refusal
        for alone in (False, synchronous_alone):
            if (tokens, alone) in known:
                return known[tokens, alone]
        kinds = [name for name in names if schedules.is_synchronous(name) or not synchronous_alone]
        try:
            found = best_layouts(
                base, shared, gpus=gpus, tokens_per_step=tokens, names=kinds, limit_gb=limit_gb
            )
        except UserError as error:
            refusal, found = error, dict.fromkeys(KINDS)
        known[tokens, synchronous_alone] = found
        return found

    @cache
    def sharded(tokens: int) -> Best | None:
        if not with_sharded:
            return None
        return sharded_best(base, gpus=gpus, tokens_per_step=tokens, costs=costs, limit_gb=limit_gb)

    points = []
    for tokens in sorted(tokens_per_step, reverse=True):
        own = best(tokens, synchronous_alone=False)
        larger = best(LARGER_BATCH * tokens, synchronous_alone=True)["synchronous"]
        points.append(
            Point(
                gpus=gpus,
                tokens_per_step=tokens,
                best=own,
                sharded=sharded(tokens),
                larger_batch=faster(larger, sharded(LARGER_BATCH * tokens)),
            )
        )
    for point in points:
        for each in (*point.best.values(), point.sharded, point.larger_batch):
            if each is not None:
                # Another process would have to find them again.
                _ = each.losses, each.layout.memory
    return points, refusal


def best_layouts(
    base: RunConfig,
    shared: Shared,
    *,
    gpus: int,
    tokens_per_step: int,
    names: Collection[str],
    limit_gb: float,
) -> dict[str, Best | None]:
    """For each of `KINDS`, the first of the pipelines of `best_first` that fits.

    One of more delay that is no faster than the others is left out.

    Raises:
        UserError: there is no layout.
    """
    best: dict[str, Estimate] = {}
    missing = {KINDS[0]} if all(map(schedules.is_synchronous, names)) else set(KINDS[:2])

    def wanted(config: RunConfig) -> bool:
        delay = delay_of(config)
        return delay is None or is_wanted(best, delay)

    asked: dict[str, Any] = {
        "gpus": gpus,
        "tokens_per_step": tokens_per_step,
        "names": names,
        "limit_gb": limit_gb,
    }
    for layout in best_first(base, shared, **asked, wanted=wanted, fitting_only=True):
        if is_wanted(best, layout.delay):
            best[kind_of_delay(layout.delay)] = layout
        if missing <= best.keys():
            break
    return {kind: Best(layout=best[kind]) if kind in best else None for kind in KINDS}


def is_wanted(best: Mapping[str, Estimate], delay: int) -> bool:
    """Whether a layout of a delay, no faster than the best so far of each kind, may be the best of its own:
    none of its kind is known, and of more delay none of any."""
    kind = kind_of_delay(delay)
    return not (best.keys() & (set(KINDS) if kind == KINDS[2] else {kind}))


def kind_of_delay(delay: int) -> str:
    """One of `KINDS`."""
    return KINDS[min(delay, 2)]


def draw(points: Sequence[Point], *, title: str, file: Path) -> None:
    """Draw the map: the ratio of the best asynchronous layout at delay 1 at each point, with that of the
    larger synchronous batch below.

    Args:
        points: of a map.
        title: above the picture.
        file: SVG, PNG or PDF, by its suffix.

    Raises:
        ValueError: the suffix is another one.
        ModuleNotFoundError: matplotlib is missing.
    """
    if file.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"{file.name}: a picture is a file of .svg, .png, .pdf")
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    gpus = sorted({point.gpus for point in points})
    tokens = sorted({point.tokens_per_step for point in points})
    shades = [[float("nan")] * len(gpus) for _ in tokens]
    # A fixed salt, so that the same map gives the same SVG.
    with mpl.rc_context({"svg.hashsalt": "asyncpp", "svg.fonttype": "path", "font.size": 8}):
        # The title is as wide as four GPU counts.
        size = 1.2 + 0.95 * max(4, len(gpus)), 1.5 + 0.62 * len(tokens)
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for point in points:
            row, column = tokens.index(point.tokens_per_step), gpus.index(point.gpus)
            ratio, larger = point.ratio("delay 1"), point.larger_batch_ratio
            if ratio is not None:
                shades[row][column] = ratio
            text = "-" if ratio is None else f"{ratio:.2f}"
            text += "" if larger is None else f"\n({larger:.2f})"
            axes.text(column, row, text, ha="center", va="center")
        norm = TwoSlopeNorm(vcenter=1.0, vmin=0.5, vmax=2.0)
        axes.imshow(shades, cmap="PuOr_r", norm=norm, alpha=0.6, aspect="auto")
        axes.set_xticks(range(len(gpus)), [f"{count:,}" for count in gpus])
        axes.set_yticks(range(len(tokens)), [f"{count:,}" for count in tokens])
        axes.invert_yaxis()
        axes.set_xlabel("GPUs")
        axes.set_ylabel("tokens per step")
        axes.set_title(
            f"{title}\nbest synchronous step, FSDP among them, over the best at a delay of 1\n"
            "(tokens/s of the doubled synchronous batch over those of the same)",
            fontsize=8,
            loc="left",
        )
        metadata = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[file.suffix]
        figure.savefig(file, metadata=metadata)
