"""asyncpp in Python: what the command line does, for notebooks and scripts.

    import asyncpp

    experiment = asyncpp.sweep("quickstart", "train.steps=100", out="tried")
    experiment.launch(replay=True)
    experiment.results()                       # a polars DataFrame, one row per cell
    experiment.figures()["validation-loss"]    # a plotly figure

Importing it imports neither torch nor polars nor plotly.
"""

from asyncpp.experiment import Experiment, open, sweep
from asyncpp.tuning import tune
from asyncpp_cli.base.errors import UserError

__all__ = ["Experiment", "UserError", "open", "sweep", "tune"]
