"""The shipped sizes have the parameters that their files say, however they are cut."""

from __future__ import annotations

import re

import pytest
import torch
import yaml
from support.files import ROOT

from stages.config.run_config import ModelConfig
from stages.model.decoder import Stage
from stages.shape.families import describe
from stages.shape.partition import cut_model

MODELS = ROOT / "templates" / "models"


@pytest.mark.parametrize("name", sorted(file.stem for file in MODELS.glob("*.yaml")))
def test_a_size_has_the_parameters_that_are_written_about_it(name: str) -> None:
    """All of them, and those that a token meets, where these are fewer."""
    text = (MODELS / f"{name}.yaml").read_text()
    settings = yaml.safe_load(text)
    settings.pop("recommended", None)
    config = ModelConfig(name=name, **settings)
    counts = []
    for stages in (1, 4):
        cuts = cut_model(config, stages=stages, context=8)
        with torch.device("meta"):
            parts = [Stage(config, cut, context=8) for cut in cuts]
        counts.append(sum(parameter.numel() for part in parts for parameter in part.parameters()))
    active = count = counts[0]
    assert counts == [count, count]
    if config.experts:
        of_an_expert = 3 * config.width * settings["expert_width"]
        active -= config.layers * (config.experts - settings["active_experts"]) * of_an_expert
    assert describe(config).active_count == active
    [said] = re.findall(r"^# ([\d,]+) parameters(?:, ([\d,]+) active)?\.$", text, re.MULTILINE)
    assert said == (f"{count:,}", f"{active:,}" if active < count else "")
