"""``brayx new``: makes a project's folder from a template; it trains without changes.

Knows nothing of running a job. Imports nothing slow, since the command line asks it for names.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

from brayx.errors import ConfigError
from brayx.jobs.shipped import TEMPLATES
from brayx.tables import aligned

_MAX_NAME = 50

KINDS = {
    "rl": "learns from games",
    "imitation": "imitates recorded games, and plays one to measure it",
    "mixed": "learns from games, with the help of recorded ones at first",
    "league": "learns by self-play",
}
_WITH_RECORDINGS = ("imitation", "mixed")
_FILES = {
    "catch": "`{name}_game.py` is the game, `{name}_agent.py` decides, `{name}_features.py` says what the model sees,\n"
    "`{name}_model.py` is the network, {expert}`{name}.yaml` has every option with its meaning.",
    "four": "`{name}_rules.py` has the rules, `{name}_game.py` plays them with two agents, `{name}_human.py` lets you "
    "play,\n`{name}_agent.py` decides, `{name}_model.py` is the network, `{name}.yaml` has every option with its "
    "meaning.",
}


def new_project(name: str, template: str, parent: str | Path = ".") -> list[Path]:
    """Makes the folder ``name``; returns its files.

    Args:
        name: name of the project, its folder and its modules: small letters of any language, digits and underscores.
        template: one of `KINDS`.
        parent: folder that gets the new one.

    Raises:
        ConfigError: no such template, a name that no module can have, or a folder that already exists.
    """
    from brayx.jobs.config import JobConfig
    from brayx.jobs.options import documented

    if template not in KINDS:
        raise ConfigError(f"template is {template!r}, expected one of {', '.join(KINDS)}", key="template")
    # Python normalises identifiers to NFKC, so a module with any other name could not be imported.
    is_name = name.isidentifier() and name[0] != "_" and name == unicodedata.normalize("NFKC", name).lower()
    if not is_name or len(name) > _MAX_NAME:
        raise ConfigError(
            f"name is {name!r}, expected at most {_MAX_NAME} small letters of any language, digits and underscores, a "
            "letter first, because modules get this name",
            key="name",
        )
    if name == "test":
        raise ConfigError("name is 'test', and pytest would take test_game.py for tests: choose another", key="name")
    origin, yaml, old = _origin(template)
    folder = Path(parent, name)
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} already exists", key="name") from None
    made = []
    for source in sorted(origin.glob("*.py")):
        if source.stem != "catch_expert" or template in _WITH_RECORDINGS:
            made.append(folder / _renamed(source.name, old, name))
            made[-1].write_text(_renamed(source.read_text(encoding="utf-8"), old, name), encoding="utf-8")
    made.append(folder / "pytest.ini")
    made[-1].write_text((origin / "pytest.ini").read_text(encoding="utf-8"), encoding="utf-8")
    made.append(folder / f"{name}.yaml")
    text = _renamed((origin / yaml).read_text(encoding="utf-8"), old, name)
    made[-1].write_text(text, encoding="utf-8")
    # Rewritten: the name makes lines longer, and comments must still fit.
    made[-1].write_text(documented(JobConfig.load(made[-1])), encoding="utf-8")
    made.append(folder / "README.md")
    made[-1].write_text(_readme(name, template), encoding="utf-8")
    return made


def _origin(template: str) -> tuple[Path, str, str]:
    """A template's folder, its job's file, and the name in its files that the project's name replaces."""
    if template == "league":
        return TEMPLATES / "league", "four.yaml", "four"
    return TEMPLATES / "catch", f"{template}.yaml", "catch"


def _renamed(text: str, old: str, name: str) -> str:
    pattern = rf"\b{old}_|(?<=test_){old}\b|(?<=project: ){old}\b"
    return re.sub(pattern, lambda match: match[0].replace(old, name), text)


def _readme(name: str, template: str) -> str:
    commands = {
        f"brayx train {name}.yaml": "learns; `mlflow ui` shows how",
        f"python {name}_game.py URL --games 3": "plays, with the URL that the job prints",
        **({f"python {name}_game.py URL --human": "you play against the agent"} if template == "league" else {}),
        "pytest": 'does it still work? Trains for a minute or two; -m "not slow": does not',
    }
    lines = aligned([(command, f"# {what}") for command, what in commands.items()], left=(0, 1))
    shown = "\n".join(f"    {line}" for line in lines)
    expert = f"`{name}_expert.py` gives recorded games, " if template in _WITH_RECORDINGS else ""
    files = _FILES[_origin(template)[2]].format(name=name, expert=expert)
    return f"""# {name}

Made by `brayx new {name} --template {template}`: {KINDS[template]}. In this folder:

{shown}

{files}
"""
