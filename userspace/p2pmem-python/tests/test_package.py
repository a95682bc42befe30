# SPDX-License-Identifier: MIT OR Apache-2.0
"""The package as users get it: types, documentation, version, and the tag of the wheel."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import p2pmem
import pytest
from p2pmem import fake, rules
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

HERE = Path(__file__).resolve().parent.parent
SITE = Path(p2pmem.__file__).parent.parent
#: Where mypy keeps what it knows: in the folder of the build, as the sources may be read-only.
CACHE = HERE.parent.parent / "build" / "mypy"


def mypy(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", *map(str, arguments)]
    environment = {**os.environ, "MYPYPATH": str(SITE), "MYPY_CACHE_DIR": str(CACHE)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600, cwd=HERE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_types_of_the_package_for_the_oldest_python() -> None:
    mypy("mypy", "--python-version", "3.9", "python/p2pmem")


def test_types_of_tests_and_examples() -> None:
    mypy("mypy", "tests", "examples")


def test_stubs_are_those_of_the_module() -> None:
    mypy("mypy.stubtest", "p2pmem._native")
    assert (SITE / "p2pmem" / "py.typed").exists() and (SITE / "p2pmem" / "_native.pyi").exists()


def test_the_module_was_built_from_these_sources() -> None:
    for source in (HERE / "python" / "p2pmem").glob("*.py*"):
        assert (SITE / "p2pmem" / source.name).read_bytes() == source.read_bytes(), source


def test_everything_public_has_a_description() -> None:
    things = [(name, getattr(p2pmem, name)) for name in p2pmem.__all__]
    things += [(f"rules.{name}", getattr(rules, name)) for name in rules.__all__]
    things += [("p2pmem", p2pmem), ("fake", fake), ("rules", rules), ("Fake", fake.Fake)]
    for name, thing in things:
        assert inspect.getdoc(thing), name
        if not inspect.isclass(thing) or issubclass(thing, Exception):
            continue
        for member, value in vars(thing).items():
            if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{name}.{member}"


def test_version() -> None:
    workspace = (HERE.parent / "Cargo.toml").read_text()
    version = re.search(r'^version = "(.+)"$', workspace, re.MULTILINE)
    assert version is not None and importlib.metadata.version("p2pmem") == version[1]


def test_one_wheel_serves_all_versions() -> None:
    wheels = list(SITE.parent.glob("*.whl"))
    if not wheels:
        pytest.skip("the package was not unpacked from a wheel")
    [wheel] = wheels
    name, _, _, tags = parse_wheel_filename(wheel.name)
    assert name == "p2pmem"
    assert {(tag.interpreter, tag.abi) for tag in tags} == {("cp39", "abi3")}
    assert tags & set(sys_tags())
