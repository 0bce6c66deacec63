"""Sealed messages, and the secret of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.hub_members import SECRET

from stages.comm.rendezvous.authenticated import ForeignError, Sealer, make_secret, read_secret


def test_messages_pass_whole_once_in_order_and_one_way() -> None:
    def sealer(direction: bytes = b"to hub", secret: bytes = SECRET) -> Sealer:
        return Sealer(secret, direction=direction, hub=b"h" * 32, member=b"m" * 32)

    sending = sealer()
    first, second = sending.seal({"number": 1}, b"one"), sending.seal({"number": 2}, b"two\n")
    opening, received = sealer(), bytearray(first + second[:-1])
    assert opening.open(received) == ({"number": 1}, b"one")
    assert opening.open(received) is None
    received += second[-1:]
    assert opening.open(received) == ({"number": 2}, b"two\n")
    with pytest.raises(ForeignError):
        opening.open(bytearray(second))  # repeated
    with pytest.raises(ForeignError):
        sealer().open(bytearray(second))  # the first is left out
    with pytest.raises(ForeignError):
        sealer(b"from hub").open(bytearray(first))  # turned back
    with pytest.raises(ForeignError):
        sealer(secret=b"x" * 32).open(bytearray(first))
    for place in range(4, len(first)):
        changed = bytearray(first)
        changed[place] ^= 1
        with pytest.raises(ForeignError):
            sealer().open(changed)


def test_a_secret_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        secret = make_secret(tmp_path / "met")
    finally:
        os.umask(before)
    file = tmp_path / "met" / "secret"
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_secret(tmp_path / "met") == secret
    assert make_secret(tmp_path / "met") != secret
    file.chmod(0o640)
    with pytest.raises(PermissionError, match="readable by its owner alone, and has mode 640"):
        read_secret(tmp_path / "met")
    (tmp_path / "elsewhere").write_text("00")
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        read_secret(tmp_path / "met")
