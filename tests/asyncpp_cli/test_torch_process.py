"""Start and end of a process that imports torch; another module stands for torch here."""

from __future__ import annotations

import sys

from support.command_line import ran


def printed(code: str) -> str:
    """Standard output of a process that runs this code."""
    done = ran(sys.executable, "-c", code)
    assert (done.code, done.errors) == (0, "")
    return done.output


def test_the_collector_rests_during_the_import_and_ignores_the_modules_later() -> None:
    shown = printed(
        "import gc\n"
        "from stages.config.torch_process import importing_torch\n"
        "at_start = gc.get_freeze_count()\n"  # Python 3.12 freezes a few objects of its own
        "print(gc.isenabled())\n"
        "with importing_torch():\n"
        "    import types, sys\n"
        "    sys.modules['torch'] = torch = types.ModuleType('torch')\n"
        "    print(gc.isenabled())\n"
        "print(gc.isenabled(), not any(other is torch for other in gc.get_objects()))\n"
        "frozen = gc.get_freeze_count()\n"
        "with importing_torch():\n"
        "    torch.later = []\n"
        "print(frozen > at_start, gc.get_freeze_count() <= frozen)\n"
    )
    assert shown == "True\nFalse\nTrue True\nTrue True\n"


def test_a_command_that_imported_torch_exits_without_interpreter_shutdown() -> None:
    code = (
        "import atexit, sys, types\n"
        "class Late:\n"
        "    def __del__(self): print('shut down')\n"
        "sys.modules[NAME] = types.ModuleType(NAME)\n"
        "sys.modules[NAME].late = Late()\n"
        "atexit.register(print, 'at exit')\n"
        "sys.argv = ['asyncpp', '--version']\n"
        "from asyncpp_cli.__main__ import main\n"
        "main()\n"
    )
    assert printed(code.replace("NAME", "'torch'")).splitlines()[1:] == ["at exit"]
    assert printed(code.replace("NAME", "'other'")).splitlines()[1:] == ["at exit", "shut down"]
