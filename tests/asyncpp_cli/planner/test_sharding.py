"""Memory under FSDP; what processes take of it is compared in `stages/rehearsal`."""

from __future__ import annotations

import pytest

from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.sharding import Sharding, memory
from stages.config.run_config import changed


def test_shards_hold_a_share_of_what_one_rank_holds() -> None:
    config = base_of("10b", ["optimizer=muon"]).config
    config = changed(config, {"schedule.microbatches": 4})
    whole, shard = (memory(config, Sharding(ranks=ranks)) for ranks in (1, 64))
    for kind in ("master", "gradients"):
        assert shard[kind] == pytest.approx(whole[kind] / 64, rel=0.01)
    # A matrix is not cut, so one rank has more of them than another.
    assert whole["optimizer"] / 64 <= shard["optimizer"] <= 1.5 * whole["optimizer"] / 64
    kept = memory(config, Sharding(ranks=64, reshard=False, reduce_each=False))
    assert kept["weights"] >= 2 * whole["master"] / 4
    assert kept["gradients"] >= whole["master"]
