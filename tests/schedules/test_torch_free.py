"""The package is of use on a machine without torch."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import schedules


def test_no_module_imports_torch_numpy_matplotlib_or_another_package_of_ours():
    modules = [module.name for module in pkgutil.walk_packages(schedules.__path__, "schedules.")]
    assert "schedules.io.torch_lists" in modules
    code = (
        f"import sys, {', '.join(modules)}\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'stages', 'optimizers', 'asyncpp_cli'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
