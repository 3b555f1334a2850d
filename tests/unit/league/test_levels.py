"""The file of levels: what is written is read, what is wrong is refused with the place, names are names."""

from __future__ import annotations

from pathlib import Path

import pytest

from brayx.errors import ConfigError, LeagueError
from brayx.league.levels import Levels, Strength, check_names, read_levels, write_levels


def strength(version: int, temperature: float = 1.0, delay: int = 0) -> Strength:
    points = 1000.0 + version
    return Strength(
        player="main", version=version, temperature=temperature, delay=delay,
        points=points, low=points - 20, high=points + 20, games=400,
    )  # fmt: skip


LEVELS = Levels(model="four", levels={"easy": strength(1, 2.5, 6), "hard": strength(2)}, others=[strength(3, 0.0)])


@pytest.mark.parametrize("levels", [LEVELS, LEVELS.model_copy(update={"others": []})])
def test_what_is_written_is_read_and_people_can_read_it(levels: Levels, tmp_path: Path) -> None:
    file = tmp_path / "levels.yaml"
    write_levels(file, levels, "By a test.")
    assert read_levels(file) == levels
    first, *lines = file.read_text().splitlines()
    assert first == "# By a test."
    assert lines[2] == (
        "  easy: {player: main, version: 1, temperature: 2.5, delay: 6, points: 1001.0, low: 981.0, high: 1021.0, "
        "games: 400}"
    )
    assert list(tmp_path.iterdir()) == [file]


def test_no_file_is_no_levels_and_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    assert read_levels(tmp_path / "levels.yaml") is None
    with pytest.raises(ConfigError, match="cannot be read"):
        read_levels(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_levels(tmp_path / "absent" / "levels.yaml", LEVELS, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("levels: [", "is not YAML"),
        ("", "levels.yaml"),
        ("model: four\nlevels: {easy: {player: main}}", r"levels\.easy\.version"),
        ("model: four\nlevels: {}", "levels are none"),
    ],
)
def test_a_file_that_is_wrong_says_where(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "levels.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_levels(tmp_path / "levels.yaml")


def test_an_unknown_level_names_the_nearest() -> None:
    assert LEVELS.level("hard") == strength(2)
    with pytest.raises(LeagueError) as refused:
        LEVELS.level("Hard")
    assert refused.value.details == {"level": "Hard", "nearest": "hard", "known": ["easy", "hard"]}


@pytest.mark.parametrize("names", [[], ["easy"], ["easy", "easy"], ["easy", ""], ["easy", "very hard"]])
def test_names_are_words_and_each_is_there_once(names: list[str]) -> None:
    with pytest.raises(ValueError, match="level"):
        check_names(names)
