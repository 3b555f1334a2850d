"""Loads user modules by name: from the folder of a job's YAML file, then ``sys.path``, then the shipped jobs' folder.

A job is sent between processes as module names and the folder's path; each process imports the modules itself. Knows
nothing of what the modules contain.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from brayx.errors import ConfigError

SHIPPED = Path(__file__).parents[1] / "pipelines" / "templates"
"""The folder of the jobs that brayx ships, and of their modules."""
_OWN = __package__


def load(module: str, attribute: str, folder: str = "") -> Any:
    """Imports ``module`` and returns its ``attribute``.

    Args:
        module: import path, as in ``import``.
        attribute: a class or function in it.
        folder: absolute path of the folder to look in first; it goes to the front of ``sys.path`` and stays there,
            so that the module's own imports and pickles of its classes work too.

    Raises:
        ConfigError: no such module or attribute (the message names the nearest), the module raises when imported, or
            another module of that name was already loaded from elsewhere.
    """
    loaded = load_module(module, folder)
    try:
        return getattr(loaded, attribute)
    except AttributeError:
        names = [name for name in vars(loaded) if not name.startswith("_")]
        raise ConfigError(
            f"module {module!r} ({loaded.__file__}) has no {attribute!r}{_nearest(attribute, names)}",
            module=module,
            attribute=attribute,
        ) from None


def load_named(path: str, folder: str = "") -> Any:
    """The class or function ``module.Name``; ``folder`` and errors as for `load`."""
    module, _, attribute = path.rpartition(".")
    return load(module, attribute, folder)


def is_named(path: str) -> bool:
    """Whether a path has the form ``module.Name``."""
    return "." in path and all(part.isidentifier() for part in path.split("."))


def load_module(module: str, folder: str = "") -> ModuleType:
    """Imports ``module``; arguments and errors as for `load`."""
    _check_name(module)
    if folder:
        # Move it to the front even if it is on the path already: another job's folder must not come before it.
        sys.path[:] = [folder, *(path for path in sys.path if path not in (folder, str(SHIPPED))), str(SHIPPED)]
        importlib.invalidate_caches()
        _refuse_other_of_same_name(module, folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise ConfigError(
                f"module {module!r} needs the module {error.name!r}, which is not installed", module=module
            ) from error
        raise _not_found(module, folder) from None
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"module {module!r} raised when imported: {type(error).__name__}: {error}", module=module
        ) from error


def check_module(module: str, folder: str = "") -> None:
    """Checks that `load_module` would find ``module``, without running it; arguments and errors as there."""
    _check_name(module)
    parts = module.split(".")
    places = [folder] if folder and parts[0] != _OWN else []
    spec = PathFinder.find_spec(parts[0], places) or _find_installed(parts[0])
    if spec is None:
        shipped = PathFinder.find_spec(parts[0], [str(SHIPPED)])
        spec = shipped if shipped is not None and shipped.origin is not None else None  # its folders are no packages
    for part in parts[1:]:
        if spec is None or spec.submodule_search_locations is None:
            break
        # By its last name: below a folder without __init__.py, the full name needs the package above to be imported.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    else:
        if spec is not None:
            return
    raise _not_found(module, folder)


def _refuse_other_of_same_name(module: str, folder: str) -> None:
    top = module.split(".")[0]
    intended = next((path for path in (Path(folder, f"{top}.py"), Path(folder, top)) if path.exists()), None)
    loaded = sys.modules.get(top)
    if intended is None or loaded is None or top == _OWN:  # the current folder may hold a checkout of brayx
        return
    places = [loaded.__file__] if getattr(loaded, "__file__", None) else []
    places += list(getattr(loaded, "__path__", []))
    if not any(place and Path(place).resolve().is_relative_to(intended.resolve()) for place in places):
        came_from = places[0] if places else "Python itself"
        raise ConfigError(
            f"module {module!r}: {intended} cannot be loaded, because another module {top!r} was loaded before from "
            f"{came_from}; rename one",
            module=module,
        )


def _modules_in(folder: Path) -> list[str]:
    try:
        entries = list(folder.iterdir())
    except OSError:
        return []
    return [entry.stem for entry in entries if entry.suffix == ".py" or (entry.is_dir() and entry.name.isidentifier())]


def _nearest(word: str, names: list[str]) -> str:
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"; nearest is {near[0]!r}" if near else ""


def _check_name(module: str) -> None:
    if not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"module is {module!r}, expected an import path such as my_game.agent", module=module)


def _find_installed(top: str) -> ModuleSpec | None:
    try:
        return find_spec(top)
    except (ImportError, ValueError):
        return None


def _not_found(module: str, folder: str) -> ConfigError:
    names = _modules_in(Path(folder)) if folder else []
    where = f"neither in {folder} nor" if folder else "not"
    return ConfigError(f"module {module!r} is {where} on sys.path{_nearest(module, names)}", module=module)
