"""`brayx promote --recordings`: promotes a version only if it acts like the agents in a set of recordings.

Knows nothing of leagues, nor of how a version is found.
"""

from __future__ import annotations

from dataclasses import dataclass

from brayx.errors import ConfigError, PromotionRefused
from brayx.league.gates import Verdict
from brayx.regression.replay import Replay, ReplaySummary, replay_recording


@dataclass(frozen=True)
class RecordingsGate:
    """What a version must reach on a set of recordings.

    Attributes:
        min_agreement: minimum share of recorded actions that the version also chooses; None: any.
        max_kl: maximum mean of KL(recorded || version), in nats; None: any.
    """

    min_agreement: float | None = None
    max_kl: float | None = None

    def __post_init__(self) -> None:
        if self.min_agreement is None and self.max_kl is None:
            raise ConfigError("--recordings is a gate only with --min-agreement or --max-kl, or both")
        if self.min_agreement is not None and not 0 <= self.min_agreement <= 1:
            raise ConfigError(f"--min-agreement is {self.min_agreement:g}, expected a share, 0 to 1")
        if self.max_kl is not None and not self.max_kl >= 0:
            raise ConfigError(f"--max-kl is {self.max_kl:g}, expected 0 or more")

    def judge(self, total: ReplaySummary) -> Verdict:
        """Whether a version with these results passes, and why."""
        reasons = []
        if self.min_agreement is not None:
            if total.agreement is None:
                return Verdict(False, "the recordings have no ticks")
            compared = f"{total.agreement:.4f} of {total.ticks} recorded actions are its own"
            if total.agreement < self.min_agreement:
                return Verdict(False, f"{compared}, expected at least {self.min_agreement:g}")
            reasons.append(f"{compared}, at least {self.min_agreement:g}")
        if self.max_kl is not None:
            if total.kl is None:
                return Verdict(False, "its KL divergence is not known: the recordings have no log-probabilities")
            compared = f"its mean KL divergence from the recorded policy is {total.kl:.4g}"
            if not total.kl <= self.max_kl:
                return Verdict(False, f"{compared}, expected at most {self.max_kl:g}")
            reasons.append(f"{compared}, at most {self.max_kl:g}")
        return Verdict(True, "; ".join(reasons))


def check_recordings(
    reference: str, recordings: str, gate: RecordingsGate, uri: str, *, job: str | None = None, trust: bool = False
) -> tuple[Replay, str]:
    """Checks a version before it is promoted.

    Args:
        reference: the version, as for `brayx.regression.replay.replay_recording`.
        recordings: folder of the recordings.
        gate: what the version must reach.
        uri: tracking URI.
        job: YAML of the job that made it; None: the job in its checkpoint.
        trust: run the code that the checkpoint names, see `brayx.jobs.stored_models.stored_model`.

    Returns:
        The version's report, and why it passes, with the numbers.

    Raises:
        PromotionRefused: the version does not pass, with the number in the message; or a recording cannot be compared.
        BrayxError: as for `brayx.regression.replay.replay_recording`.
    """
    report = replay_recording(recordings, reference, tracking=uri, job=job, trust=trust)
    if report.failed or report.unreadable:
        why = report.failed[0].error.message if report.failed else "its files cannot be read"
        count = len(report.failed) + report.unreadable
        raise PromotionRefused(f"{report.model} is not promoted: {count} recordings cannot be compared: {why}")
    verdict = gate.judge(report.total)
    if not verdict.passed:
        raise PromotionRefused(f"{report.model} is not promoted: {verdict.reason}", **report.total.as_dict())
    return report, verdict.reason
