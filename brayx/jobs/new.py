"""``brayx new``: makes a project's folder from a template; it trains without changes.

A project is either Python (a game, an agent, a model, a job with every option), or a game by contract in another
language with a copy of ``game.yaml``.

Knows nothing of running a job. Imports nothing slow, since the command line asks it for names.
"""

from __future__ import annotations

import re
import shutil
import unicodedata
from pathlib import Path
from typing import NamedTuple

from brayx.errors import ConfigError
from brayx.jobs.shipped import TEMPLATES
from brayx.tables import aligned

_MAX_NAME = 50

KINDS = {
    "rl": "learns from games",
    "imitation": "imitates recorded games, and plays one to measure it",
    "mixed": "learns from games, with the help of recorded ones at first",
    "league": "learns by self-play",
    "js": "learns from a game in JavaScript, without Python",
    "csharp": "learns from a game in C#, without Python",
    "cpp": "learns from a game in C++, without Python",
    "godot": "learns from a project of Godot 4, without Python",
    "unity": "learns from a project of Unity, without Python",
}
_WITH_RECORDINGS = ("imitation", "mixed")
_FILES = {
    "catch": "`{name}_game.py` is the game, `{name}_agent.py` decides, `{name}_features.py` says what the model sees,\n"
    "`{name}_model.py` is the network, {expert}`{name}.yaml` has every option with its meaning.",
    "four": "`{name}_rules.py` has the rules, `{name}_game.py` plays them with two agents, `{name}_human.py` lets you "
    "play,\n`{name}_agent.py` decides, `{name}_model.py` is the network, `{name}.yaml` has every option with its "
    "meaning.",
}


class _Game(NamedTuple):
    """A game without Python."""

    file: str
    play: str | None = None
    """Command that plays games at a URL, their number behind it; None: a person presses Play."""
    door: str = "http"
    build: str | None = None


_GAMES = {
    "js": _Game("game.mjs", "node game.mjs {url}"),
    "csharp": _Game("game.cs", "dotnet run -- {url}"),
    "cpp": _Game("game.cpp", "./game {url}", "tcp", build="g++ -std=c++17 -O2 -Iinclude game.cpp -o game"),
    "godot": _Game("game.gd"),
    "unity": _Game("Assets/Walk.cs"),
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
    from brayx.yaml_text import value_of

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
    if (read := value_of(name)) != name:
        raise ConfigError(f"name is {name!r}, which YAML takes for {read}: choose another", key="name")
    folder = Path(parent, name)
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} already exists", key="name") from None
    return (_game_project if template in _GAMES else _python_project)(name, template, folder)


def _python_project(name: str, template: str, folder: Path) -> list[Path]:
    from brayx.jobs.config import JobConfig
    from brayx.jobs.options import documented

    origin, yaml, old = _origin(template)
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


_TARGET = "training ends at this mean return: set what a good game of yours returns"


def _game_project(name: str, template: str, folder: Path) -> list[Path]:
    shutil.copytree(TEMPLATES / "game" / template, folder, dirs_exist_ok=True)
    game = _GAMES[template]
    values = {"project": name, "num_steps": "200_000", "target_return": f"0.75     # {_TARGET}"}
    if game.play is not None:
        endless = f"{game.play} 1000000000"
        command = f"sh -c '{game.build} && exec {endless}'" if game.build else endless
        values["gamecores"] = f'[{{command: "{command}", door: {game.door}}}]'
    text = (TEMPLATES / "game.yaml").read_text(encoding="utf-8")
    text = text.replace("train game.yaml", f"train {name}.yaml").replace("check game.yaml", f"check {name}.yaml")
    if game.play is not None:
        text = text.replace("`, then start the game.", "` starts it.")
    for key, value in values.items():
        before, start, after = re.split(rf"(?m)(^ *{key}: )\S+(?: *#.*)?$", text, maxsplit=1)
        text = f"{before}{start}{value}{after}"
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(_game_readme(name, template), encoding="utf-8")
    return sorted(file for file in folder.rglob("*") if file.is_file())


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
    expert = f"`{name}_expert.py` gives recorded games, " if template in _WITH_RECORDINGS else ""
    files = _FILES[_origin(template)[2]].format(name=name, expert=expert)
    return _document(name, template, KINDS[template], commands, files)


def _game_readme(name: str, template: str) -> str:
    game = _GAMES[template]
    learns = "learns until the mean return is 0.75"
    if game.play is None:
        play = {f"open this folder in {template.capitalize()}": "and press Play, while one of them runs"}
    else:
        learns += "; starts the game"
        by_hand = game.play.format(url={"http": "http://127.0.0.1:8000", "tcp": "tcp://127.0.0.1:8101"}[game.door])
        play = {f"{by_hand} 100": "plays 100 games with the champion"}
    commands = {f"brayx train {name}.yaml": learns, f"brayx serve {name}.yaml": "serves the champion", **play}
    files = (
        f"`{game.file}` is the game: replace the walk by yours, and say in its contract what the agent sees and does.\n"
        f"`{name}.yaml` is the job: network, learning, ports."
    )
    return _document(name, template, KINDS[template], commands, files)


def _document(name: str, template: str, what: str, commands: dict[str, str], files: str) -> str:
    lines = aligned([(command, f"# {meaning}") for command, meaning in commands.items()], left=(0, 1))
    shown = "\n".join(f"    {line}" for line in lines)
    return f"""# {name}

Made by `brayx new {name} --template {template}`: {what}. In this folder:

{shown}

{files}
"""
