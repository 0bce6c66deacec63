"""The moments at which a rank may hold the most, against a comparison of all with all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schedules import Op
from stages.memory.in_flight import Moment, _largest

COUNTS = st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 3))] * 2)
MOMENTS = st.frozensets(
    st.builds(Moment, st.sampled_from([Op.FORWARD, Op.UPDATE]), st.integers(0, 1), COUNTS)
)


def _exceeds(one: Moment, other: Moment) -> bool:
    pairs = [
        pair for stages in zip(one.counts, other.counts, strict=True) for pair in zip(*stages, strict=True)
    ]
    return one != other and one[:2] == other[:2] and all(more >= less for more, less in pairs)


@given(MOMENTS)
def test_no_moment_is_left_out_that_no_other_exceeds(moments: frozenset[Moment]) -> None:
    wanted = {moment for moment in moments if not any(_exceeds(other, moment) for other in moments)}
    assert set(_largest(moments)) == wanted
