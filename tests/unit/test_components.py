"""User modules by name, next to a YAML file or installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from brayx.components import check_module, load, load_module
from brayx.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "brayx_test_agent.py").write_text("class Mine:\n    pass\n")
    (tmp_path / "brayx_test_broken.py").write_text("raise RuntimeError('no luck')\n")
    (tmp_path / "brayx_test_needy.py").write_text("import not_installed_anywhere\n")
    package = tmp_path / "brayx_test_package"
    package.mkdir()
    (package / "model.py").write_text("from brayx_test_agent import Mine\nvalue = 7\n")
    (package / "deeper").mkdir()
    (package / "deeper" / "still.py").write_text("")
    path, modules = list(sys.path), set(sys.modules)
    yield str(tmp_path)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("brayx_test_"):
            del sys.modules[name]


def test_a_module_beside_the_file_is_found(folder: str) -> None:
    assert load("brayx_test_agent", "Mine", folder).__name__ == "Mine"
    assert load("brayx_test_package.model", "value", folder) == 7
    assert sys.path[0] == folder


def test_a_module_on_the_path_is_found() -> None:
    assert load("json", "dumps")({}) == "{}"
    check_module("brayx.types")


@pytest.mark.parametrize("check", [check_module, load_module])
def test_a_missing_module_names_the_nearest(check: object, folder: str) -> None:
    assert callable(check)
    with pytest.raises(ConfigError, match=r"'brayx_test_agnet'.*'brayx_test_agent'"):
        check("brayx_test_agnet", folder)
    for name in ("brayx_test_package.absent", "brayx_test_agent.absent", "brayx.absent", "absent.absent"):
        with pytest.raises(ConfigError, match="is neither in"):
            check(name, folder)
    with pytest.raises(ConfigError, match=r"'agents/mine\.py'") as refused:
        check("agents/mine.py", folder)
    assert refused.value.details == {"module": "agents/mine.py"}


def test_a_missing_attribute_names_the_nearest(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"has no 'mine'; nearest is 'Mine'"):
        load("brayx_test_agent", "mine", folder)


def test_a_module_that_raises_is_reported_with_its_error(folder: str) -> None:
    with pytest.raises(ConfigError, match="RuntimeError: no luck") as refused:
        load_module("brayx_test_broken", folder)
    assert refused.value.details == {"module": "brayx_test_broken"}
    with pytest.raises(ConfigError, match="'not_installed_anywhere'"):
        load_module("brayx_test_needy", folder)


def test_checking_runs_nothing(folder: str) -> None:
    check_module("brayx_test_broken", folder)
    check_module("brayx_test_package.model", folder)
    check_module("brayx_test_package.deeper.still", folder)  # neither folder has an __init__.py
    assert not any(name.startswith("brayx_test_") for name in sys.modules)


def test_the_same_module_name_from_elsewhere_is_refused(folder: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    load_module("brayx_test_agent", folder)
    other = tmp_path_factory.mktemp("other")
    (other / "brayx_test_agent.py").write_text("class Other:\n    pass\n")
    with pytest.raises(ConfigError, match=r"'brayx_test_agent' .*; rename one"):
        load("brayx_test_agent", "Other", str(other))
    (other / "json.py").write_text("")
    with pytest.raises(ConfigError, match="another module 'json'"):
        load_module("json", str(other))


def test_the_last_folder_comes_first(folder: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = str(tmp_path_factory.mktemp("other"))
    load_module("brayx_test_agent", folder)
    with pytest.raises(ConfigError):
        load_module("nothing_here", other)
    assert sys.path[:2] == [other, folder]
    load_module("brayx_test_agent", folder)
    assert sys.path[:2] == [folder, other]


def test_another_process_loads_it_the_same_way(folder: str) -> None:
    code = "import sys; from brayx.components import load; print(load(*sys.argv[1:]).__module__)"
    command = [sys.executable, "-c", code, "brayx_test_package.model", "Mine", folder]
    done = subprocess.run(command, check=True, timeout=240, capture_output=True, text=True)
    assert done.stdout == "brayx_test_agent\n"
