"""Parts of engines that need a GPU to be imported whole: some modules are the real ones, the rest of the package is stood in for.

An engine is a folder that holds its package, as a wheel has it; nothing is installed::

    python -m zipfile -e vllm-*.whl vllm-wheel
    ONELAYER_VLLM=vllm-wheel ONELAYER_SGLANG=sglang-wheel python -m pytest heavy
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import Distribution, DistributionFinder, distributions
from pathlib import Path
from typing import Any
from unittest import mock

import pytest


class _StandIn(types.ModuleType):
    """A module that has whatever it is asked for: real modules below it, empty classes under names of classes, else mocks."""

    def __init__(self, name: str, real: Collection[str]) -> None:
        super().__init__(name)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        if full_name in self._real:
            return importlib.import_module(full_name)
        made: Any = type(name, (), {}) if name[0].isupper() else mock.MagicMock(name=full_name)
        setattr(self, name, made)
        return made


class _Parts(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of one package: the real ones, or stand-ins."""

    def __init__(
        self, package: str, folder: Path, real: Collection[str], given: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._package = package
        self._folder = folder
        self._real = frozenset(real)
        self._given = given

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self._package:
            return None
        if name not in self._real:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        file = self._folder.joinpath(*name.split("."))
        package = file / "__init__.py"
        if package.is_file():
            return importlib.util.spec_from_file_location(name, package, submodule_search_locations=[str(file)])
        return importlib.util.spec_from_file_location(name, file.with_suffix(".py"))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name, self._real)

    def exec_module(self, module: types.ModuleType) -> None:
        for name, value in self._given.get(module.__name__, {}).items():
            setattr(module, name, value)


class _Absent(importlib.abc.MetaPathFinder):
    """Asked last: stand-ins for given modules of other packages, which nobody else has found."""

    def __init__(self, parts: _Parts, given: Collection[str]) -> None:
        self._parts = parts
        self._given = given

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self._parts, is_package=True) if name in self._given else None


def use(variable: str, package: str, real: Collection[str], given: Mapping[str, Mapping[str, Any]]) -> str:
    """Makes these modules of an engine importable, and returns the engine's version. Where there is none, skips who asks.

    ``given`` has what stand-ins must have to be of use: attributes by module. A module of another package is stood in for only if
    it is not installed.
    """
    named = os.environ.get(variable)
    if not named:
        message = f"SKIPPED: {variable} names no folder with the package {package}: its plug-in was not tested"
        print(message, file=sys.stderr)
        pytest.skip(message, allow_module_level=True)
    folder = Path(named).resolve()
    assert (folder / package / "__init__.py").is_file(), f"{variable}: no package {package} in {folder}"
    parts = _Parts(package, folder, real, given)
    sys.meta_path.insert(0, parts)
    sys.meta_path.append(_Absent(parts, given))
    return distribution(folder, package).version


def distribution(folder: Path, package: str) -> Distribution:
    """What the wheel says about itself."""
    context = DistributionFinder.Context(name=package, path=[str(folder)])
    return next(iter(distributions(context=context)))


def entry_points(group: str) -> dict[str, Any]:
    """The entry points of the installed package `onelayer`, by name."""
    from importlib.metadata import entry_points as installed

    return {point.name: point for point in installed(group=group) if point.dist and point.dist.name == "onelayer"}
