"""GPUs that a plan knows by name, and those that a user describes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.command_line import refusal, succeeded

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.planner.costs.devices import DEVICES, description, find_device, peak_tflops

OWN = "tflops=165,memory_gb=24,memory_gbs=1008,link_gbs=32"


def test_a_device_of_ones_own_is_keys_or_a_file(tmp_path: Path) -> None:
    by_keys = find_device(OWN, key="--device")
    known = DEVICES["rtx4090"]
    assert (by_keys.memory_gb, by_keys.bandwidth_gbs, by_keys.link_gbs) == (24, 1008, 32)
    assert by_keys.tflops == {"bfloat16": 165, "float32": 82.5}
    assert (by_keys.network_gbs, by_keys.gpus_per_node) == (50, 8)
    assert abs(by_keys.tflops["bfloat16"] / known.tflops["bfloat16"] - 1) < 0.01
    file = tmp_path / "mine.yaml"
    file.write_text(OWN.replace("=", ": ").replace(",", "\n") + "\ntflops_float32: 82.6\ngpus_per_node: 4\n")
    by_file = find_device(str(file), key="--device")
    assert (by_file.tflops["float32"], by_file.gpus_per_node, by_file.memory_gb) == (82.6, 4, 24)


def test_a_known_device_has_other_links_and_is_found_by_its_description(tmp_path: Path) -> None:
    shared = find_device("rtx4090,gpus_per_node=4,node_gbs=1.25", key="--device")
    known = DEVICES["rtx4090"]
    assert (shared.network_gbs, shared.gpus_per_node, shared.shares_adapter) == (1.25 / 4, 4, True)
    assert (shared.name, shared.tflops, shared.memory_gb) == ("rtx4090", known.tflops, 24)
    of_eight = shared.in_nodes(8)
    assert (of_eight.node_gbs, known.in_nodes(2).network_gbs) == (1.25, known.network_gbs)
    file = tmp_path / "mine.yaml"
    file.write_text(OWN.replace("=", ": ").replace(",", "\n"))
    for name in ("rtx4090", OWN, str(file), "rtx4090,memory_gb=48,tflops=100", f"{file},memory_gb=48"):
        device = find_device(name, key="--device")
        links = {"network_gbs": 1.25 / 4, "gpus_per_node": 4, "shares_adapter": True}
        for linked in (
            device,
            replace(device, network_gbs=3.0),
            device.in_nodes(2),
            replace(device, **links),
        ):
            assert replace(find_device(description(linked), key="site.gpu"), name=device.name) == linked


def test_a_known_device_with_other_numbers_is_named_with_them(tmp_path: Path) -> None:
    """Its template would have those of the data sheet else, and its plan's title name that."""
    changed = find_device("rtx4090, memory_gb=48,node_gbs=1.25", key="--device")
    assert (changed.name, changed.memory_gb) == ("rtx4090,memory_gb=48", 48)
    assert find_device(description(changed), key="site.gpu").memory_gb == 48


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("rtx4091", "did you mean rtx4090.*; or a GPU of your own as tflops=165,"),
        ("tflops=165,memory_gb=24", "memory_gbs is missing .*its bandwidth"),
        ("tflops=165,memory=24,memory_gbs=1", "'memory' is not known; did you mean memory_gb"),
        ("tflops=x,memory_gb=24,memory_gbs=1", "tflops is x; accepted: dense peak in bfloat16"),
        ("tflops=1e99,memory_gb=24,memory_gbs=1", "tflops is 1e99; accepted"),
        ("tflops=nan,memory_gb=24,memory_gbs=1", "tflops is nan; accepted"),
        ("rtx4090,node_gbit=10", "'node_gbit' is not known; did you mean node_gbs"),
        (f"{OWN},gpus_per_node=1.5", "gpus_per_node is 1.5; accepted"),
        (f"{OWN},matrix_share=2", "matrix_share is 2; accepted: .* at most 1"),
        ("nowhere.yaml", "nowhere.yaml cannot be read"),
    ],
)
def test_a_device_that_is_not_known_is_told_with_what_is_accepted(name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        find_device(name, key="--device")


def test_each_device_has_its_peak_by_the_name_that_torch_gives_it() -> None:
    names = {
        "rtx4090": "NVIDIA GeForce RTX 4090",
        "rtx3090": "NVIDIA GeForce RTX 3090",
        "a6000": "NVIDIA RTX A6000",
        "a10": "NVIDIA A10",
        "v100": "Tesla V100-SXM2-32GB",
        "l4": "NVIDIA L4",
        "mi300x": "AMD Instinct MI300X",
    }
    for device, name in names.items():
        assert peak_tflops(name, "bfloat16") == DEVICES[device].tflops["bfloat16"]
    assert peak_tflops("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16") is None
    assert peak_tflops("NVIDIA GeForce RTX 4090 D", "bfloat16") is None


@pytest.mark.slow
def test_sixteen_rtx4090_are_planned_by_name_and_by_keys() -> None:
    words = ["plan", "1b", "--gpus", "16", "--bandwidth", "2.5", "--rows", "1", "--device"]
    for device in ("rtx4090", OWN):
        assert device in succeeded(*words, device).output


def test_a_model_of_another_size_is_a_file_of_sizes() -> None:
    says = (
        "another size is a file of sizes: asyncpp templates show 1b > 1.3b.yaml, edit it, and name 1.3b.yaml"
    )
    for words in (["plan", "1.3b", "--gpus", "16"], ["sweep", "quickstart", "model=1.3b", "--list"]):
        assert says in refusal(*words)
    assert "file of sizes" not in refusal("plan", "mimo", "--gpus", "16")
