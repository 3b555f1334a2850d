"""`learn` inside a trial of Ray Tune: checkpoints go to Tune with what was measured, and come from it.

    def trainable(options):
        torch.manual_seed(options["seed"])
        module, forward_args = build_model(...)
        numbers = ReportedNumbers()
        learn(config, module, forward_args, ..., numbers=numbers, keeper=TuneKeeper(numbers), ...)

    tune.Tuner(trainable, param_space={...}).fit()

So schedulers see each checkpoint's numbers and may stop the trial there, and population based training moves a trial's
checkpoint to another. Knows nothing of what is searched, nor of MLflow: a trial may have a run of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from brayx.metrics import METRICS, Kind, Recorder
from brayx.trainer.loop import Numbers


class ReportedNumbers:
    """`loop.Numbers` of one trial: samples gather until they are reported.

    Args:
        games: gives the games' returns as `loop.Numbers.newest` does; None: nobody plays.
        also: gets every sample, too, the trial's books in MLflow say.
    """

    def __init__(self, games: Callable[[], Mapping[str, float]] | None = None, also: Numbers | None = None) -> None:
        self._games = games
        self._also = also
        self._recorder = Recorder()
        self._sums: dict[str, float] = {}

    def add(self, name: str, value: float, *, label: str = "", kind: Kind | None = None, weight: float = 1.0) -> None:
        """Records one sample."""
        self._recorder.add(name, value, label=label, kind=kind, weight=weight)
        if self._also is not None:
            self._also.add(name, value, label=label, kind=kind, weight=weight)

    def newest(self) -> Mapping[str, float]:
        """The games' numbers."""
        return {} if self._games is None else self._games()

    def take(self) -> dict[str, float]:
        """Numbers of the samples since the last call, sums from the beginning; and the games'."""
        summary = self._recorder.summary()
        cells, own = self._recorder.drain()
        for (name, label), cell in cells.items():
            if (METRICS.get(name) or own[name]).kind is Kind.SUM:
                key = f"{name}.{label}" if label else name
                summary[key] = self._sums[key] = self._sums.get(key, 0.0) + cell.total
        return {**summary, **self.newest()}


class TuneKeeper:
    """`saving.Keeper` in a trial of Ray Tune: reports each checkpoint with the numbers since the last.

    Args:
        numbers: of this trial.
    """

    def __init__(self, numbers: ReportedNumbers) -> None:
        self._numbers = numbers

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """Reports ``folder``, which Tune copies before this returns, as ``env_steps`` ``step``.

        A trial that its scheduler stops ends here.
        """
        from ray import tune

        numbers = {**self._numbers.take(), **metrics, "env_steps": step}
        tune.report(numbers, checkpoint=tune.Checkpoint.from_directory(str(folder)))

    def latest(self) -> Path | None:
        """A local copy of the checkpoint that Tune starts this trial from; None: from the beginning."""
        from ray import tune

        checkpoint = tune.get_checkpoint()
        return None if checkpoint is None else Path(checkpoint.to_directory())
