"""`brayx.league.finding`: which league a command means, and where its books are."""

from __future__ import annotations

from pathlib import Path

import pytest

from brayx.errors import ConfigError
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.league.finding import newest_league
from brayx.league.member import Member
from brayx.league.named import Opponents
from brayx.league.requested import read_pool
from brayx.tracking import Trial
from tests.unit.conftest import Run
from tests.unit.league.written import Written, finish, new_league


def test_a_league_that_is_not_there_is_named_with_those_that_are(written: Written, tmp_path: Path) -> None:
    uri = written.trial.uri
    Trial.open("other", "plain", uri)
    assert newest_league(uri).run_id == newest_league(uri, "four", "league").run_id == written.trial.run_id
    for arguments, said in {
        ("five", ""): r"'five'.*four",
        (
            "other",
            "",
        ): rf"'other' in {uri}.*\(plain\).*{tmp_path}/leagues",
        ("", "main"): "'main'.*: league in",
    }.items():
        with pytest.raises(ConfigError, match=said):
            newest_league(uri, *arguments)


def test_every_command_takes_the_league_with_the_newest_snapshot_or_that_of_a_trial(
    written: Written, command: Run, tmp_path: Path
) -> None:
    uri = written.trial.uri
    job = JobConfig.load(TEMPLATES / "league" / "four.yaml")

    def newest(trial: str = "") -> set[str]:
        """What the commands take; the pool that is served, by its oldest snapshot."""
        served = read_pool("four", uri, project="four", trial=trial).snapshots
        oldest = {"league": Member("main", 1), "second": Member("main", 3)}
        names = {
            newest_league(uri, "four", trial).name,
            Opponents(job, uri, trial).league.name,
            *(name for name, first in oldest.items() if served[:1] == [first]),
        }
        shown = command("league", "show", "four", *(["--trial", trial] if trial else []), "--tracking", uri)
        return names | {shown.stdout.split("'")[1]}

    second = new_league(uri, "second")
    assert newest() == {"league"}, "the second one has no snapshot yet"
    assert newest_league(uri, "four", "second") == second.trial
    assert read_pool("four", uri, project="four", trial="second").snapshots == []
    second.freeze(tmp_path / "files", 3.0, 1000)
    assert newest() == {"second"}
    assert newest("league") == newest(written.trial.run_id) == {"league"}
    written.freeze(tmp_path / "files", 4.0, 3000)
    assert newest() == {"league"}, "wherever a training goes on"
    with pytest.raises(ConfigError, match=r"'four'.*'main'.*: league, second in"):
        Opponents(job, uri, "main")
    finish(second)
    promoted = command("promote", "--league", "main:3", "--trial", "second", "--tracking", uri)
    assert (promoted.returncode, "four version 3 is champion now" in promoted.stdout) == (0, True), promoted.stderr
    refused = command("promote", "--league", "models:/four/3", "--trial", "second", "--tracking", uri)
    assert "trial is 'second', but models:/four/3 has its own trial" in refused.stderr


@pytest.mark.parametrize(
    "verb", [["show"], ["ratings"], ["export", "books.json"], ["calibrate"], ["match"], ["promote"]]
)
def test_in_a_folder_without_a_league_each_command_says_what_it_looked_for_where_and_what_to_do(
    verb: list[str], command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    job = str(TEMPLATES / "league" / "four.yaml")
    words = {
        "calibrate": ["league", "calibrate", job],
        "match": ["match", job, "main:1", "random"],
        "promote": ["promote", "--league", "main:1"],
    }
    failed = command(*words.get(verb[0], ["league", *verb]))
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1 + (verb[0] in ("calibrate", "match")))
    assert (
        f"no league: there is no MLflow database {tmp_path}/mlflow.db. Run the command in the folder where `brayx "
        "train` ran, or name its database with --tracking"
    ) in failed.stderr
    assert list(tmp_path.iterdir()) == [], "a command that only looks makes no file"


def test_books_that_are_elsewhere_are_named_with_their_place(written: Written, command: Run, tmp_path: Path) -> None:
    finish(written)
    (tmp_path / "leagues").rename(tmp_path / "elsewhere")
    file = tmp_path / "leagues" / written.trial.run_id / "books.sqlite"
    for words in (
        ["league", "show"],
        ["league", "export", str(tmp_path / "f.json")],
        ["promote", "--league", "main:2"],
    ):
        failed = command(*words, "--tracking", written.trial.uri)
        assert failed.returncode == 2
        assert f"the books of league 'league' of project 'four' are not here: there is no {file}" in failed.stderr
        assert "copy the folder `leagues` from there" in failed.stderr
