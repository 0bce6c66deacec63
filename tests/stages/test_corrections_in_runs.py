"""Corrections beside error feedback, put into a run by name: what they compute there, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import Rows, small_config

from stages.check import ConfigError, check
from stages.config import CorrectionConfig, RunConfig
from stages.trainer import replay


def losses(config: RunConfig) -> list[float]:
    check(config)
    rows = Rows()
    replay(config, recorder=rows)
    return [row["train_loss"] for row in rows.of_kind("step")]


def config_of(text: Path, schedule: str = "2bw", coefficient: float = 0.0, **correction: object) -> RunConfig:
    config = small_config(
        schedule,
        text=text,
        coefficient=coefficient,
        precision="float64",
        clip="stage" if schedule == "pipedream" else "global",
        steps=5,
        stages=3 if schedule == "pipedream" else 2,
    )
    config.correction = CorrectionConfig(**correction)  # type: ignore[arg-type]
    return config


def test_a_reach_of_nothing_is_plain_delay(text: Path) -> None:
    plain = losses(config_of(text))
    assert losses(config_of(text, name="weight-prediction", reach=0.0)) == plain
    assert losses(config_of(text, name="weight-prediction")) != plain


def test_an_anneal_of_nothing_is_plain_delay(text: Path) -> None:
    plain = losses(config_of(text, "pipedream"))
    assert losses(config_of(text, "pipedream", name="lr-discount", anneal=0)) == plain
    assert losses(config_of(text, "pipedream", name="lr-discount")) != plain


def test_the_horizon_is_the_stages_delay(text: Path) -> None:
    """2bw has a delay of 1, so there half the reach is half the prediction: error feedback of 0.5 but for its
    start."""
    whole = losses(config_of(text, name="weight-prediction"))
    half = losses(config_of(text, name="weight-prediction", reach=0.5))
    assert whole[:2] == half[:2], "the first two steps compute with the first weights"
    assert whole[2:] != half[2:]


def test_stage_aware_refresh_differs_where_delays_differ(text: Path) -> None:
    found = {}
    for schedule in ("pipedream", "2bw"):
        for aware in (False, True):
            config = config_of(text, schedule)
            config.optimizer.name, config.optimizer.refresh_interval = "basis-rotation", 2
            config.optimizer.stage_aware = aware
            found[schedule, aware] = losses(config)
    assert found["2bw", True] == found["2bw", False], "one delay, one interval"
    assert found["pipedream", True] != found["pipedream", False]


@pytest.mark.parametrize(
    ("schedule", "coefficient", "correction", "key", "words"),
    [
        ("2bw", 0.0, {"name": "prediction"}, "correction.name", "accepted: none, weight-prediction"),
        ("1f1b", 0.0, {"name": "lr-discount"}, "correction.name", "a synchronous schedule has none"),
        ("2bw", 1.0, {"name": "lr-discount"}, "correction.name", "do not go together"),
        (
            "2bw",
            0.0,
            {"name": "lr-discount", "reach": 1.0},
            "correction",
            "no option 'reach'; accepted: anneal",
        ),
        ("2bw", 0.0, {"anneal": 3}, "correction", "has settings and no name"),
        (
            "2bw",
            0.0,
            {"name": "weight-prediction", "flavour": "adam"},
            "correction",
            "accepted: last-update | momentum | adam-moments",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    text: Path, schedule: str, coefficient: float, correction: dict[str, object], key: str, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check(config_of(text, schedule, coefficient, **correction))
    assert error.value.key == key
    assert words in error.value.message


def test_a_flavour_that_the_optimizer_cannot_serve_is_refused(text: Path) -> None:
    config = config_of(text, name="weight-prediction", flavour="adam-moments")
    check(config)
    config.optimizer.name = "muon"
    with pytest.raises(ConfigError, match="moments of adamw only"):
        check(config)
    config.correction.flavour = "momentum"
    check(config)
    config.optimizer.name = "soap"
    with pytest.raises(ConfigError, match="soap keeps none"):
        check(config)
