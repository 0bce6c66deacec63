"""Who holds and owns what under `fsdp` and `hsdp`."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stages.shape.sharded_layout import Layout, matrix_rounds, values

SHAPES = st.one_of(
    st.tuples(st.integers(1, 9)),
    st.tuples(st.integers(1, 9), st.integers(1, 4)),
    st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)),
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=6))
    shards, groups = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return Layout(
        names=tuple(f"p{number}" for number in range(len(shapes))),
        shapes=tuple(shapes),
        in_place=tuple(draw(st.booleans()) or len(shape) == 1 for shape in shapes),
        processes=shards * groups,
        shards=shards,
    )


@given(layouts())
def test_every_group_holds_each_row_once_and_every_matrix_has_one_owner(layout: Layout) -> None:
    for first in range(0, layout.processes, layout.shards):
        group = range(first, first + layout.shards)
        held = [(piece.parameter, row) for at in group for piece in layout.held(at) for row in piece.rows]
        assert sorted(held) == [
            (at, row) for at, shape in enumerate(layout.shapes) for row in range(shape[0])
        ]
    owned = Counter(piece for at in range(layout.processes) for piece in layout.owned(at))
    groups = layout.processes // layout.shards
    assert all(times == (1 if layout.moves(piece.parameter) else groups) for piece, times in owned.items())
    names = {piece.name for at in range(layout.processes) for piece in layout.held(at)}
    assert len(names) == len(
        {(piece.parameter, piece.rows) for at in range(layout.processes) for piece in layout.held(at)}
    )


@given(layouts())
def test_what_is_sent_is_received_and_makes_whole_matrices(layout: Layout) -> None:
    for ways in (layout.to_owners, layout.from_owners):
        routes = [ways(process) for process in range(layout.processes)]
        sent = [
            (at, route.peer, route.matrix, route.rows)
            for at in range(layout.processes)
            for route in routes[at][0]
        ]
        came = [
            (route.peer, at, route.matrix, route.rows)
            for at in range(layout.processes)
            for route in routes[at][1]
        ]
        assert Counter(sent) == Counter(came)
    for owner in range(layout.processes):
        rows = Counter((route.matrix, row) for route in layout.to_owners(owner)[1] for row in route.rows)
        own = [number for number, other in enumerate(layout.owners) if other == owner]
        assert rows == Counter((number, row) for number in own for row in layout.matrices[number].rows)
    for process in range(layout.processes):
        rows = Counter((route.matrix, row) for route in layout.from_owners(process)[1] for row in route.rows)
        assert all(times == 1 for times in rows.values())


@given(layouts(), st.integers(1, 64))
def test_rounds_take_each_matrix_once(layout: Layout, most: int) -> None:
    rounds = matrix_rounds(layout, number_bytes=4, most=most)
    assert [number for each in rounds for number in each] == list(range(len(layout.matrices)))
    largest = (
        max(4 * values(layout.shapes[piece.parameter], piece.rows) for piece in layout.matrices)
        if rounds
        else 0
    )
    for each in rounds:
        of_round = [layout.matrices[number] for number in each]
        size = sum(4 * values(layout.shapes[piece.parameter], piece.rows) for piece in of_round)
        assert size < most * layout.processes + largest
