"""Stamps what is built with its version and commit; everything else is said in pyproject.toml."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent


def _code_version() -> ModuleType:
    """The module that reads the stamp later; by its path, since the package is not installed yet."""
    spec = importlib.util.spec_from_file_location(
        "asyncpp_code_version", ROOT / "asyncpp_cli" / "base" / "version.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


code_version = _code_version()
STAMP = code_version.stamp_of(ROOT)


class BuildPython(build_py):
    """Adds the stamp to what is installed. An editable installation asks the checkout when it runs."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            code_version.write_stamp(STAMP, Path(self.build_lib))


class SourceDistribution(sdist):
    """Adds the stamp: a source distribution has no checkout around it."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        code_version.write_stamp(STAMP, Path(base_dir))


setup(version=STAMP.version, cmdclass={"build_py": BuildPython, "sdist": SourceDistribution})
