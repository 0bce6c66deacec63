"""Which keys of a profile are named for a refusal of sbatch."""

import pytest

from asyncpp_cli.launch.submission.sbatch import profile_keys

POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(
    ("message", "keys"),
    [
        (f"AssocMaxSubmitJobLimit; {POLICY}", "submit_limit"),
        (f"QOSMaxSubmitJobPerUserLimit; {POLICY}", "submit_limit"),
        (f"AssocMaxWallDurationPerJobLimit; {POLICY}", "time, qos"),
        (POLICY, "submit_limit, qos, account, time"),
        ("Invalid account or account/partition combination specified", "account, partition, qos"),
        ("invalid partition specified: nowhere", "partition"),
        ("Invalid qos specification", "qos"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "time"),
    ],
)
def test_the_keys_that_may_be_the_cause(message: str, keys: str) -> None:
    assert profile_keys(f"sbatch: {message}") == keys
