"""Settings that do not go together are refused by key, with what is accepted."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
from support.small_runs import small_config

from stages.config.run_config import changed
from stages.resolve.checks import ConfigError, check
from stages.resolve.facts import facts

OWN = "support.two_weights:WeightPair"
MUP = {
    "model.parametrization": "mup",
    "model.base_width": 4,
    "model.base_layers": 1,
    "model.base_head_dim": 1,
}
LARGE = 10_000
WITHOUT_EXPERTS = dict.fromkeys(
    map("model.{}".format, ("shared_experts", "dense_layers", "active_experts")), 1
)
WITHOUT_EXPERTS |= {
    "model.router_score": "softmax",
    "model.route_normalised": False,
    "model.route_scale": 2.0,
}
WITHOUT_EXPERTS |= {"model.balance": "bias", "model.balance_rate": 0.1, "model.expert_width": 12}

# A key that is refused, its value, and words of the refusal; by settings of `small_config`.
OF_ANY = [
    ("schedule.name", "2wb", "accepted: gpipe, 1f1b"),
    ("optimizer.name", "adam", "did you mean adamw?"),
    ("parallel.stages", 5, "5 stages are asked for"),
    ("parallel.data", 0, "must be at least 1"),
    ("train.max_skipped", -1, "must be at least 0"),
    ("schedule.microbatches", 0, "must be at least 1"),
    ("schedule.microbatches", 50_001, "accepted"),
    ("train.clip", "glob", "accepted: global, stage, none"),
    ("model.heads", 3, "must divide model.width = 16"),
    ("model.head_dim", 5, "must be even for rotary positions"),
    ("model.head_dim", 0, "must be at least 1"),
    ("model.family", "lama", "accepted: llama, qwen3"),
    ("model.kv_heads", 3, "must divide model.heads = 4"),
    ("model.vocab_size", 100, "needs 256"),
    ("model.rope_base", 0.0, "must be at least 1"),
    ("model.norm_eps", -1.0, "must be above 0"),
    ("data.path", "/nowhere/at/all", "does not exist"),
    ("data.document_mask", True, "text.txt does not record which token ends a document"),
    ("data.end_of_document", 10, "goes with data.document_mask: true; accepted without it: null"),
    ("optimizer.lr", nan, "must be above 0"),
    ("optimizer.warmup", 1.5, "must be at most 1"),
    ("optimizer.schedule", "cosin", "did you mean cosine? accepted: cosine, linear"),
    ("optimizer.decay_share", 0.5, "of wsd, not of cosine; accepted with it: null"),
    ("model.logit_softcap", 0.0, "is 0, must be above 0"),
    ("model.base_width", 8, "goes with model.parametrization: mup; accepted with standard"),
    ("model.parametrization", "sp", "'sp' is not known; accepted: standard, mup"),
    ("model.tied", True, "on 0 and 1; accepted: false, parallel.stages: 1, or a schedule in a V"),
    *((key, value, "and model.experts is 0; accepted") for key, value in WITHOUT_EXPERTS.items()),
    ("correction.name", "lr-discount", "a synchronous schedule has none"),
    *(
        ("parallel.cut", cut, "of 2 stages, whole or with .5, 4 in all and at least 0.5 each")
        for cut in (
            *([], [4], [2, 1], [0, 4], [5, -1], [2, 1, 1], [1.25, 2.75], [3.5, 1], [3.75, 0.25]),
            *([nan, 4], [inf, 1]),
        )
    ),
]
OF_DOCUMENTS = [
    ("data.end_of_document", 256, "is 256, must be below model.vocab_size = 256"),
    ("data.end_of_document", -1, "at least 0"),
    ("train.cuda_graphs", True, "does not go with data.document_mask"),
]
OF_EXPERTS = [
    ("model.active_experts", 9, "is 9, must be from 1 to model.experts = 6"),
    ("model.active_experts", None, "is null, must be from 1 to model.experts = 6"),
    ("model.active_experts", 0, "is 0, must be at least 1"),
    ("model.expert_width", None, "is null, must be at least 1"),
    ("model.expert_width", 0, "is 0, must be at least 1"),
    ("model.shared_experts", -1, "is -1, must be at least 0"),
    ("model.dense_layers", 4, "is 4, must be below model.layers = 4"),
    ("model.router_score", "relu", "'relu' is not known; accepted: sigmoid, softmax, null"),
    ("model.balance", "loss", "'loss' is not known; accepted: bias, none, null"),
    ("model.balance_rate", 0.0, "is 0, must be above 0"),
    ("model.route_scale", -1.0, "is -1, must be above 0"),
    ("train.cuda_graphs", True, "does not go with experts, whose rows depend on the tokens"),
]
OF_2BW = [
    ("correction.name", "prediction", "accepted: none, weight-prediction"),
    ("correction.name", "discrepancy", "this schedule stashes those"),
]
OF_PACI = [
    ("correction.name", "delay-compensation", "keeps no older ones"),
    ("train.compile", True, "accepted with it: train.recompute: full"),
    ("model.tied", True, "needs embedding and head on one rank"),
]
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (given, {key: value}, f"{key}: {says}")
    for given, rows in (
        ({}, OF_ANY),
        ({"documents": True}, OF_DOCUMENTS),
        ({"family": "experts"}, OF_EXPERTS),
        ({"schedule": "2bw"}, OF_2BW),
        ({"schedule": "paci"}, OF_PACI),
        ({"schedule": "pipedream"}, [("correction.name", "sync-start", "schedule.update_interval = 2")]),
        ({"schedule": "interleaved-1f1b"}, [("model.tied", True, "interleaved-1f1b has them on 0 and 1")]),
        ({"schedule": "2bw-v"}, [("schedule.microbatches", 30_000, "accepted")]),
    )
    for key, value, says in rows
]
EXPERTS, OF_WSD = {"family": "experts"}, {"optimizer.schedule": "wsd", "optimizer.warmup": 0.1}
PREDICTED, DISCOUNTED = {"correction.name": "weight-prediction"}, {"correction.name": "lr-discount"}
SYNC_START = {"correction.name": "sync-start"}
SHARDS = {"schedule": "2bw", "stages": 3, "microbatches": 6, "shard_head": True}
OF_SHARDS: list[tuple[dict[str, Any], str]] = [
    ({"model.factory": OWN}, "parallel.shard_head: needs a head that the program knows"),
    ({"model.z_loss": 1e-4}, "parallel.shard_head: computes the plain cross-entropy, without model."),
    ({"data.path": __file__, "model.vocab_size": 2}, "parallel.shard_head: each rank some of the 2 tok"),
    ({"optimizer.name": "scion"}, "parallel.shard_head: needs an optimizer that updates rows of the"),
    ({"train.clip": "stage"}, "parallel.shard_head: makes stages of the head's shards, and train.clip is"),
    ({"schedule.name": "pipedream", "train.clip": "none"}, "schedule: stages update on their own, and"),
    ({"schedule.name": "looped-bfs", "schedule.chunks": 2}, "schedule: need backwards of the last stage"),
    ({"schedule.microbatches": 2}, "schedule.microbatches: needs at least 3 micro-batches per step for"),
    (
        {"model.tied": True, "parallel.data": 2, "parallel.shard_gradients": True},
        "parallel.shard_gradients: keeps one whole gradient, and shards that embedding and head",
    ),
]
# What is refused for another key, or several: the key, and words of the refusal.
TOGETHER: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"error_feedback.coefficient": 1.0}, "error_feedback: 1f1b has none"),
    ({}, {"schedule.name": "paci"}, "train.clip: accepted with it: stage, none"),
    ({}, {"optimizer.momentum": 0.9}, "optimizer: momentum"),
    ({}, {"parallel.data": LARGE, "train.microbatch_size": LARGE}, "train.microbatch_size: accepted"),
    ({}, {"train.eval_microbatches": 10**6, "train.microbatch_size": 100}, "train.microbatch_size: accepted"),
    ({}, {"model.factory": OWN, "model.z_loss": 1e-4}, "model.z_loss: goes with the decoder"),
    ({}, {"model.factory": OWN, "model.logit_softcap": 9.0}, "model.logit_softcap: goes with the decoder"),
    ({}, {"model.parametrization": "mup"}, "model.base_width: is null, and model.parametrization is mup"),
    ({}, MUP | {"model.factory": OWN}, "model.parametrization: mup: goes with the decoder"),
    ({}, MUP | {"optimizer.name": "soap"}, "model.parametrization: mup: how steps of soap should"),
    (
        {},
        {"train.cuda_graphs": True, "site.device": "cpu"},
        "train.cuda_graphs: does not go with site.device",
    ),
    ({}, OF_WSD | {"optimizer.decay_share": 0.0}, "optimizer.decay_share: must be above 0"),
    ({}, OF_WSD | {"optimizer.decay_share": 0.95}, "optimizer.decay_share: accepted with it: at most 0.9"),
    ({"documents": True}, {"model.factory": OWN}, "data.document_mask: blocks of model.factory take no mask"),
    (EXPERTS, {"model.factory": OWN}, "model.experts: goes with the decoder, not with model.factory"),
    (EXPERTS, MUP, "model.parametrization: mup: is not known for mixtures of experts"),
    (
        EXPERTS,
        {"model.balance": "none", "model.balance_rate": 0.1},
        "model.balance_rate: model.balance is none",
    ),
    (
        {"schedule": "2bw"},
        {"parallel.stages": 4},
        "schedule.microbatches: 2bw with 4 stages needs at least 3",
    ),
    ({"schedule": "2bw"}, {"correction.anneal": 3}, "correction: has settings and no name"),
    ({"schedule": "2bw", "coefficient": 1.0}, DISCOUNTED, "correction.name: do not go together"),
    ({"schedule": "2bw"}, SYNC_START | {"correction.sync_steps": -1}, "correction: whole number at least 0"),
    (
        {"schedule": "2bw-v"},
        SYNC_START | {"schedule.microbatches": 1, "schedule.delay": 9},
        "schedule: 2bw-v on 2 ranks needs at least 2 micro-batches",
    ),
    ({"schedule": "2bw"}, DISCOUNTED | {"correction.reach": 1.0}, "correction: 'reach'; accepted: anneal"),
    (
        {"schedule": "2bw"},
        PREDICTED | {"correction.flavour": "adam"},
        "correction: accepted: last-update | mom",
    ),
    *(
        ({"schedule": "2bw", "optimizer": optimizer}, PREDICTED | {"correction.flavour": flavour}, says)
        for optimizer, flavour, says in (
            ("muon", "adam-moments", "correction.flavour: moments of adamw only"),
            ("soap", "momentum", "correction.flavour: soap keeps none"),
        )
    ),
    (
        {"schedule": "paci", "data": 2},
        {"correction.name": "discrepancy"},
        "parallel.data: is 2, and discrepancy needs",
    ),
    *((SHARDS, changed, says) for changed, says in OF_SHARDS),
]


@pytest.mark.parametrize(("given", "settings", "says"), [*REFUSED, *TOGETHER])
def test_what_does_not_go_together_is_refused_by_key(
    given: dict[str, Any], settings: dict[str, Any], says: str
) -> None:
    check(small_config(**given))
    with pytest.raises(ConfigError) as refused:
        check(changed(small_config(**given), settings))
    key, _, words = says.partition(": ")
    assert refused.value.key == key
    assert words in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(("optimizer", "flavour"), [("muon", "momentum"), ("adamw", "adam-moments")])
def test_a_flavour_that_the_optimizer_serves_is_accepted(optimizer: str, flavour: str) -> None:
    correction = {"correction.name": "weight-prediction", "correction.flavour": flavour}
    check(changed(small_config("2bw", optimizer=optimizer), correction))


@pytest.mark.parametrize(
    ("steps", "eval_interval"), [(10, 3), (9, 3), (2, 5), (10**7, 10**7), (10**6, 7 * 10**5)]
)
def test_segments_cover_the_run_and_end_at_every_evaluation(steps: int, eval_interval: int) -> None:
    lengths = facts(small_config(steps=steps, eval_interval=eval_interval)).segments()
    ends = [first + count for first, count in lengths]
    assert [first for first, _ in lengths] == [0, *ends[:-1]]
    assert ends[-1] == steps
    assert set(range(eval_interval, steps + 1, eval_interval)) <= set(ends)
    assert max(count for _, count in lengths) <= 125_000
