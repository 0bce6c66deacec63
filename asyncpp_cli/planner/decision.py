"""Where asynchrony saves time: the best layouts by delay, over numbers of GPUs and tokens per step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal

import schedules
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.base.progress import shown
from asyncpp_cli.base.worker import exit_with_parent
from asyncpp_cli.planner.layouts import CONSIDERED
from asyncpp_cli.planner.listing import KINDS, Layout, Listing, listed
from asyncpp_cli.planner.shared import CostModel, Kept, Shared
from stages.config.run_config import RunConfig

ROWS = 6
"""Numbers of GPUs of a map."""
TOKENS = (0.5, 1, 2, 4)
"""Tokens per step of a map, over those of the run."""
LARGER_BATCH = 2
"""Tokens per step of the third choice, over those of the point."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best layouts of so many GPUs and tokens per step; None: none fits."""

    gpus: int
    tokens_per_step: int
    found: Listing
    """The listing of this point, without further rows."""
    larger_batch: Layout | None
    """The best synchronous layout at `LARGER_BATCH` times the tokens per step, FSDP among them."""

    @property
    def layouts(self) -> dict[str, Layout | None]:
        """The best pipelines by `KINDS`, the best of FSDP and HSDP, and the one with the larger batch."""
        of_kinds = {kind: self.found.best.get(kind) for kind in KINDS}
        sharded = next(iter(self.found.sharded), None)
        return of_kinds | {"sharded": sharded, "larger batch": self.larger_batch}

    @property
    def fastest(self) -> str | None:
        """Kind of the layout with the shortest step: one of `KINDS`, or the name of FSDP or HSDP."""
        names = {each.name.partition(",")[0]: each for each in self.found.sharded}
        kinds = {kind: each for kind, each in self.layouts.items() if kind in KINDS and each} | names
        return min(kinds, key=lambda kind: kinds[kind].step.seconds, default=None)

    def ratio(self, kind: str) -> float | None:
        """Time of the best synchronous step over that of another layout; of a larger batch its tokens per
        second over those of the best synchronous layout."""
        synchronous, other = self.found.synchronous, self.layouts[kind]
        if synchronous is None or other is None:
            return None
        if kind == "larger batch":
            return other.tokens_per_second / synchronous.tokens_per_second
        return synchronous.step.seconds / other.step.seconds


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
        limit_gb=limit_gb,
        names=list(names),
        with_sharded=with_sharded,
    )
    points, refusal = [], None
    with ExitStack() as opened:
        advance = opened.enter_context(shown("comparing layouts", total=len(counts)))
        planned: Iterator[tuple[list[Point], UserError | None]]
        if min(processes, len(counts)) > 1:
            pool = get_context("spawn").Pool(min(processes, len(counts)), _start_worker, (costs,))
            # The most GPUs take longest.
            planned = opened.enter_context(pool).imap(partial(_in_worker, points_of), reversed(counts))
        else:
            planned = map(partial(points_of, Shared(costs)), counts)
        for of_count, refused in planned:
            points += of_count
            refusal = refused or refusal
            advance(1)
    if refusal is not None and not any(point.fastest for point in points):
        raise refusal
    return sorted(points, key=lambda point: (point.tokens_per_step, point.gpus))


_shared_in_worker: list[Shared] = []
"""What a worker has found for the numbers of GPUs that it planned: their programs are much the same."""


def _start_worker(costs: CostModel) -> None:
    # Ctrl-C is the parent's alone, which then ends the others.
    signal(SIGINT, SIG_IGN)
    exit_with_parent()
    _shared_in_worker.append(Shared(costs))


def _in_worker(points_of: Callable[[Shared, int], Kept], gpus: int) -> Kept:
    return points_of(_shared_in_worker[0], gpus)


def _points(
    base: RunConfig,
    shared: Shared,
    gpus: int,
    *,
    tokens_per_step: Sequence[int],
    limit_gb: float,
    names: Collection[str],
    with_sharded: bool,
) -> tuple[list[Point], UserError | None]:
    """The points of a number of GPUs, and why one of them has no layout."""
    refusal: UserError | None = None

    def find(tokens: int, of: Collection[str]) -> Listing:
        nonlocal refusal
        numbers = {"gpus": gpus, "tokens_per_step": tokens}
        try:
            return listed(base, shared, names=of, limit_gb=limit_gb, with_sharded=with_sharded, **numbers)
        except UserError as error:
            # Of tokens that were asked for, not of the larger batch.
            refusal = error if tokens in tokens_per_step else refusal
            return Listing()

    found: dict[int, Listing] = {}
    points = []
    for tokens in sorted(tokens_per_step, reverse=True):
        found[tokens] = find(tokens, names)
        more = LARGER_BATCH * tokens
        larger = found[more] if more in found else find(more, [*filter(schedules.is_synchronous, names)])
        points.append(
            Point(
                gpus=gpus,
                tokens_per_step=tokens,
                found=found[tokens],
                larger_batch=larger.synchronous,
            )
        )
    for point in points:
        for each in point.layouts.values():
            if each is not None:
                # Another process would have to find them again.
                _ = each.losses, each.memory
    return points, refusal


def check_picture(file: Path) -> None:
    """Check that `draw` can draw, before the work whose result it draws; it raises the same."""
    import matplotlib as mpl  # noqa: F401

    if file.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"{file.name}: a picture is a file of .svg, .png, .pdf")


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
    check_picture(file)
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
            ratio, larger = point.ratio("delay 1"), point.ratio("larger batch")
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
