"""The shipped sizes have the parameters that their files and docs/models.md say, however they are cut."""

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

SIZES = {
    "micro": 53_536,
    "nano": 853_120,
    "deep": 821_312,
    "95m": 95_281_536,
    "134m": 133_903_104,
    "135m": 162_826_560,
    "360m": 409_007_040,
    "gpt2-medium": 406_635_520,
    "qwen3-0.6b": 751_632_384,
    "1b": 964_113_024,
    "2b": 1_903_290_880,
    "3b": 3_120_737_280,
    "7b": 7_382_241_280,
    "10b": 9_999_585_280,
    "nano-moe": 2_630_784,
    "1b-7b-moe": 6_919_100_416,
    "2b-moe": 1_991_679_232,
    "10b-moe": 10_275_627_008,
}
ACTIVE = {"nano-moe": 861_312, "1b-7b-moe": 1_281_955_840, "2b-moe": 406_232_320, "10b-moe": 1_819_910_144}
"""Parameters that a token meets, where these are not all."""


def content(name: str) -> str:
    return (ROOT / "templates" / "models" / f"{name}.yaml").read_text()


def parameters(name: str, *, stages: int) -> int:
    settings = yaml.safe_load(content(name))
    settings.pop("recommended", None)
    config = ModelConfig(name=name, **settings)
    with torch.device("meta"):
        parts = [Stage(config, cut, context=8) for cut in cut_model(config, stages=stages, context=8)]
    return sum(parameter.numel() for part in parts for parameter in part.parameters())


def test_every_shipped_size_is_listed_here() -> None:
    assert {file.stem for file in (ROOT / "templates" / "models").glob("*.yaml")} == set(SIZES)


@pytest.mark.parametrize(("name", "count"), SIZES.items())
def test_a_size_has_the_parameters_that_are_written_about_it(name: str, count: int) -> None:
    assert parameters(name, stages=1) == parameters(name, stages=4) == count
    active = ACTIVE.get(name)
    said = f"{count:,} parameters" + (f", {active:,} active" if active else "")
    assert f"# {said}.\n" in content(name)
    rows = re.findall(
        rf"^\| `{name}` \| ([\d,]+)(?: \(([\d,]+) active\))? \|",
        (ROOT / "docs" / "models.md").read_text(),
        re.MULTILINE,
    )
    assert rows[0] == (f"{count:,}", f"{active:,}" if active else "")


@pytest.mark.parametrize("name", SIZES)
def test_active_parameters_are_those_that_a_token_meets(name: str) -> None:
    settings = yaml.safe_load(content(name))
    settings.pop("recommended", None)
    config = ModelConfig(name=name, **settings)
    idle = 0
    if config.experts:
        of_an_expert = 3 * config.width * settings["expert_width"]
        idle = config.layers * (config.experts - settings["active_experts"]) * of_an_expert
    assert describe(config).active_count == SIZES[name] - idle == ACTIVE.get(name, SIZES[name])


def test_the_family_in_the_documents_is_the_one_in_the_code() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    assert (ROOT / "stages" / "shape" / "qwen3.py").read_text() in text
