"""asyncpp in Python: what the command line does, for notebooks and scripts.

    import asyncpp

    experiment = asyncpp.sweep("quickstart", "train.steps=100", out="tried")
    experiment.launch(replay=True)
    experiment.results()                       # a polars DataFrame, one row per cell
    experiment.figures()["validation-loss"]    # a plotly figure

Importing it is fast: torch, polars and plotly load when first needed.
"""

from asyncpp.experiment import Experiment, open, sweep
from asyncpp.tuning import tune
from asyncpp_cli.base.errors import UserError

__all__ = ["Experiment", "UserError", "open", "sweep", "tune"]
