from __future__ import annotations

from stages.comm.sharding import silent_mesh


def test_the_mesh_knows_all_processes_though_it_meets_none() -> None:
    mesh = silent_mesh("cpu", rank=1, size=3)
    assert (mesh.size(), mesh.get_local_rank()) == (3, 1)
    assert (mesh.get_group().size(), mesh.get_group().rank()) == (3, 1)
    # A process may train several runs, one after another.
    assert silent_mesh("cpu", rank=0, size=2).size() == 2
