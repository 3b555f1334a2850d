"""Where the weights of served models come from: registered versions, by an alias or fixed."""

from __future__ import annotations

import pytest

from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.jobs.weights import followed_by, pool_args, registered, sources_of
from brayx.model.arms import Followed, WeightSource

CHAMPION, CANARY = Followed("a"), Followed("b", canary="candidate", share=0.1)
SOURCES = {
    "by alias": WeightSource(followed=CHAMPION, version=1, name="a"),
    "fixed": WeightSource(version=7, name="f"),
    "as built": WeightSource(),
}


def test_sessions_get_the_followed_versions_the_fixed_one_or_none() -> None:
    assert followed_by(SOURCES) == {"by alias": CHAMPION}
    assert registered(SOURCES, {"by alias": [3, 2]}) == {
        "by alias": ["models:/a/2", "models:/a/3"],
        "fixed": ["models:/f/7"],
        "as built": [],
    }


def test_results_are_logged_in_the_project_only_beside_a_canary() -> None:
    job = JobConfig.load(TEMPLATES / "cartpole.yaml")
    assert pool_args(job, "uri", SOURCES) == ("uri", "", {"by alias": CHAMPION})
    followed = {"by alias": CHAMPION, "requested": CANARY}
    assert pool_args(job, "uri", SOURCES, {"requested": CANARY}) == ("uri", job.project, followed)


@pytest.mark.parametrize(("file", "said"), [("cartpole.yaml", ["serving model 'model' untrained"]), ("game.yaml", [])])
def test_a_model_is_said_to_be_untrained_unless_its_contract_is_missing(
    file: str, said: list[str], tracking_db: str, caplog: pytest.LogCaptureFixture
) -> None:
    sources = sources_of(JobConfig.load(TEMPLATES / file), tracking_db, {})
    assert [source.checkpoint for source in sources.values()] == [""]
    assert [message.partition(":")[0] for message in caplog.messages] == said
