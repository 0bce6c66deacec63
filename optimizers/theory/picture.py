"""The frontier drawn with matplotlib, which is imported here and only when a picture is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from optimizers.theory.frontier import Point

SUFFIXES = (".svg", ".png", ".pdf")


def draw_frontier(named: Mapping[str, Point], best: Sequence[Point], *, delay: int, file: Path) -> None:
    """Draw the stability limit over the lag: the frontier as a line, optimizers as points.

    Args:
        named: Optimizers by name.
        best: The frontier's points, by increasing lag.
        delay: Of the gradients, for the title.
        file: An SVG, PNG or PDF, by its suffix.

    Raises:
        ValueError: The suffix is another one.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{file}: a picture is a file of {', '.join(SUFFIXES)}")
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Fixed names inside an SVG and no date, so that drawing the same picture again writes the same file.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[file.suffix]
    with mpl.rc_context({"svg.hashsalt": "asyncpp", "svg.fonttype": "path", "font.size": 8}):
        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.plot([p.lag for p in best], [p.limit for p in best], color="#0072B2", label="frontier")
        axes.plot([p.lag for p in named.values()], [p.limit for p in named.values()], "o", color="#D55E00")
        for name, found in named.items():
            axes.annotate(
                name, (found.lag, found.limit), xytext=(4, 2), textcoords="offset points", fontsize=6
            )
        axes.set(xscale="log", yscale="log")
        # Room for the names of the points furthest right.
        axes.set_xlim(right=2.5 * axes.get_xlim()[1])
        axes.set_xlabel("lag: mean age of the gradients in an update, updates")
        axes.set_ylabel("largest stable learning rate x curvature")
        axes.set_title(f"Momentum as a filter, delay {delay}")
        axes.grid(which="both", linewidth=0.3)
        axes.legend(frameon=False)
        figure.savefig(file, dpi=150, metadata=metadata)
