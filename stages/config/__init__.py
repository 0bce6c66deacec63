"""The configuration of a run, its records, and what every other folder of `stages` reads of it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.config.run_config import ModelConfig as ModelConfig


def __getattr__(name: str) -> Any:
    """`ModelConfig`, which users' models import from here; the command line starts without configurations."""
    if name == "ModelConfig":
        from stages.config.run_config import ModelConfig

        return ModelConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
