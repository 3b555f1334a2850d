"""`brayx.cluster.search`: the number of concurrent trials, and the rules in Ray Tune's scheduler."""

from __future__ import annotations

import pytest
from ray.tune.experiment import Trial

from brayx.cluster.search import scheduler, shares
from brayx.search.competition import Asha, Competition, Population

ASHA = Asha(max_steps=9000, grace_steps=1000)
POPULATION = Population(dict)


@pytest.mark.parametrize(
    ("competition", "trials", "cpus", "expected"),
    [
        (ASHA, 8, 2.0, (1.0, 2)),
        (ASHA, 8, 64.0, (1.0, 8)),
        (ASHA, 3, 0.5, (0.5, 1)),
        (POPULATION, 8, 2.0, (0.25, None)),
        (POPULATION, 2, 64.0, (1.0, None)),
    ],
)
def test_the_clusters_cpus_decide_how_many_trials_run(
    competition: Competition, trials: int, cpus: float, expected: tuple[float, int | None]
) -> None:
    assert shares(competition, trials, cpus) == expected


def test_asha_compares_trials_at_the_same_env_steps_for_any_reporting() -> None:
    """A trial with long games first reports at 3000 steps; its return is high for 1000 steps and low for 3000."""
    asha = scheduler(ASHA)
    asha.set_search_properties("score", "max")
    quick, slow, late = (Trial("a_trial", trial_id=name, stub=True) for name in ("quick", "slow", "late"))
    for trial in (quick, slow, late):
        asha.on_trial_add(None, trial)

    def verdict(trial: Trial, env_steps: int, looks: int, score: float) -> str:
        numbers = {"env_steps": env_steps, "training_iteration": looks, "score": score}
        return str(asha.on_trial_result(None, trial, numbers))

    for looks in (1, 2, 3):
        assert verdict(quick, 1000 * looks, looks, 10.0 * looks) == "CONTINUE"
    assert verdict(slow, 3040, 1, 25.0) == "STOP"
    assert verdict(late, 3010, 1, 35.0) == "CONTINUE"
    assert verdict(late, 4010, 2, 90.0) == "CONTINUE"
    other = Trial("a_trial", trial_id="other", stub=True)
    asha.on_trial_add(None, other)
    assert verdict(other, 1000, 1, 12.0) == "CONTINUE", "a score at 4010 steps is not compared with those at 1000"
