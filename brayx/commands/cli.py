"""The command line: ``brayx --help``.

Each command imports what it needs when it runs: a gamecore must start fast and load neither Ray nor torch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import brayx
from brayx.command_line import SWITCH, Parser, count, print_result
from brayx.commands.completion import SHELLS, script
from brayx.commands.league import JOB, SET, TRACKING_OF_JOB, league_verbs, trial_option
from brayx.commands.new import KINDS
from brayx.commands.recordings import TRUST, recordings_verbs
from brayx.commands.replay import gate_options, passed, replay_options
from brayx.commands.service import console_options, doctor_options, evaluate_options, keys_options
from brayx.errors import BrayxError, ConfigError
from brayx.jobs.shipped import TEMPLATES, job_file
from brayx.shutdown import end_within, leave, mark

_AGAIN_S = 0.05
_PLAYER = "models:/NAME/7, main:7 of the league, a checkpoint's folder, a script of the job's league, module.function"

GAMECORES = {"gym": "any Gymnasium environment", "pettingzoo": "any PettingZoo environment, a session for each agent"}

OWN = {
    "ppo": ("brayx.commands.ppo", "PPO for an environment in Python, in this process or over a cluster"),
    "tune": ("brayx.search.tune", "search options of a training: many trials, one table"),
    "visualize": ("brayx.commands.visualize", "draw the curves of one or several trials"),
}
"""Commands whose module has its own parser, and their help."""


def run(argv: Sequence[str] | None = None) -> None:
    """The command ``brayx``."""
    try:
        code = main(argv)
    except SystemExit as exited:  # argparse's help and errors
        code = exited.code if isinstance(exited.code, int) else 1
    leave(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; a typed error is one line on standard error and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["gamecore"] and len(words) > 1 and words[1] in GAMECORES:
        # Its own parser, so that `python -m brayx.bridges.gym` and this command cannot drift apart.
        play = importlib.import_module(f"brayx.bridges.{words[1]}").main
        return int(play(words[2:]))
    own = words[:1] and words[0] in OWN
    arguments = None if own else _parser().parse_args(words)
    # Read when Ray is imported: a thread that outlives its job must not start a new Ray by calling the one that ended.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    mark()
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _interrupt_again
    try:
        if arguments is None:
            code: int = importlib.import_module(OWN[words[0]][0]).main(words[1:])
        else:
            code = arguments.run(arguments)
        return code
    except BrayxError as error:
        if os.environ.get("BRAYX_TRACEBACK"):
            raise
        print(f"brayx: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ends the command cleanly. Further interrupts during the clean-up, which has deadlines, are ignored."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_within()
    raise KeyboardInterrupt


def _raise_once(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Repeats an interrupt that arrived where nothing can be raised: in a finaliser, or in logging's hook of a fork."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    signal.signal(signal.SIGINT, _raise_once)
    again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="brayx",
        description="Train game agents and serve them with one code path.",
        epilog="Set BRAYX_TRACEBACK=1 to see where an error was raised.",
    )
    parser.add_argument("--version", action="version", version=f"brayx {brayx.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    for name, add_options, what in (
        ("demo", _demo_options, "train CartPole through the door, serve the champion, play 20 games"),
        ("train", _train_options, "run a job's training"),
        ("serve", _serve_options, "serve a job's champion in this process; `serve run` does it on Ray"),
        ("evaluate", evaluate_options, "play games against a running service"),
        ("match", _match_options, "play games between two players, each in both seats: win rate and interval"),
        (
            "league",
            league_verbs,
            "show, ratings, export: look at a league, also while it trains; calibrate: levels of difficulty",
        ),
        (
            "recordings",
            recordings_verbs,
            "list: recorded sessions; export: as a Minari dataset, for Rerun or as videos; log: to a trial",
        ),
        ("replay", replay_options, "compare what another version would have done in recorded sessions"),
        ("export", _export_options, "a model as files for other runtimes, compared with torch"),
        ("new", _new_options, "make a project's folder: a game, an agent, a model and a job that trains as it is"),
        ("check", _check_options, "validate a job's YAML and print it with every option, its default and its meaning"),
        ("trials", _trials_options, "list the trials: status, env steps, return, and which is champion"),
        ("promote", _promote_options, "point an alias of the registry at a version: services follow it"),
        ("scale", _scale_options, "change the number of rollout workers of a running training"),
        ("console", console_options, "a web page of trials, models and recordings; with a URL, of a running job"),
        ("doctor", doctor_options, "try a service layer by layer, and say which one is broken"),
        ("keys", keys_options, "make keys for a service or a console"),
        ("completion", _completion_options, "print shell completion: source <(brayx completion bash)"),
    ):
        add_options(commands.add_parser(name, help=what))
    gamecore = commands.add_parser("gamecore", help="play as a game: `brayx gamecore gym ENV_ID --url URL`")
    for name, (_, what) in OWN.items():
        commands.add_parser(name, help=what, add_help=False)
    kinds = gamecore.add_subparsers(title="kinds", required=True, metavar="KIND")
    for kind, what in GAMECORES.items():
        kinds.add_parser(kind, help=what, add_help=False)
    return parser


def _demo_options(demo: argparse.ArgumentParser) -> None:
    _training_options(demo)
    demo.add_argument("--games", type=count, default=20, help="games of the final evaluation (default: 20)")
    demo.set_defaults(run=_demo, config=str(TEMPLATES / "cartpole.yaml"))


def _train_options(train: argparse.ArgumentParser) -> None:
    train.add_argument("config", type=job_file, help=JOB)
    _training_options(train)
    train.set_defaults(run=_train)


def _serve_options(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("config", type=job_file, help=JOB)
    serve.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=SET)
    serve.add_argument("--actor", default="", help="name of the job's actor (default: the only one)")
    serve.add_argument(
        "--model", dest="models", action="append", default=[], metavar="[NAME=]MODEL",
        help="version that a model serves: models:/NAME@ALIAS, which it follows, or models:/NAME/3 (default: champion)",
    )  # fmt: skip
    trial_option(serve)
    serve.add_argument("--tracking", help="MLflow's URI, or the path of its sqlite file (default: ./mlflow.db)")
    serve.set_defaults(run=_serve)


def _match_options(match: argparse.ArgumentParser) -> None:
    match.add_argument("config", type=job_file, help=JOB)
    for name in ("a", "b"):
        match.add_argument(name, metavar=name.upper(), help=_PLAYER)
    match.add_argument("--games", type=count, default=200, help="number of games that count (default: 200)")
    match.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=SET)
    match.add_argument("--actor", default="", help="name of the job's actor (default: the only one)")
    match.add_argument("--seed", type=int, help="seed of the agents and the seats (default: the job's)")
    match.add_argument(
        "--timeout-s", type=float, default=180.0, help="deadline for the next game to end (default: 180)"
    )
    match.add_argument(
        "--explore",
        help="both explore, as in training, where ratings come from (default: they play as served)",
        **SWITCH,
    )
    match.add_argument("--json", help="print one JSON document", **SWITCH)
    trial_option(match)
    match.add_argument("--tracking", help=TRACKING_OF_JOB)
    match.set_defaults(run=_match)


def _export_options(export: argparse.ArgumentParser) -> None:
    export.add_argument("reference", metavar="MODEL", help="models:/NAME@ALIAS, or the folder of a checkpoint")
    export.add_argument(
        "--to", nargs="+", required=True, choices=["onnx", "int8", "tensorrt"], metavar="RUNTIME",
        help="onnx, int8, tensorrt: one or several",
    )  # fmt: skip
    export.add_argument("--out", required=True, type=Path, help="folder to write")
    export.add_argument("--tracking", help="MLflow's URI, or the path of its sqlite file (default: ./mlflow.db)")
    export.add_argument("--job", help="YAML of the job that made it (default: as the checkpoint has it)")
    export.add_argument("--trust", help=TRUST, **SWITCH)
    export.add_argument(
        "--model", metavar="NAME",
        help="the model component, if the job has several and neither the version's name nor the trainer says which",
    )  # fmt: skip
    export.add_argument(
        "--batch-sizes", nargs="+", type=count, default=[1, 8, 64], metavar="N",
        help="to compare and to time at (default: 1 8 64)",
    )  # fmt: skip
    export.set_defaults(run=_export)


def _new_options(new: argparse.ArgumentParser) -> None:
    new.add_argument(
        "name", help="name of the project and its folder: small letters of any language, digits, underscores"
    )
    new.add_argument(
        "--template",
        choices=list(KINDS),
        default="rl",
        help=f"{'; '.join(f'{kind}: {what}' for kind, what in KINDS.items())} (default: %(default)s)",
    )
    new.set_defaults(run=_new_project)


def _check_options(check: argparse.ArgumentParser) -> None:
    check.add_argument("config", type=job_file, help=JOB)
    check.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    check.set_defaults(run=_check)


def _trials_options(trials: argparse.ArgumentParser) -> None:
    trials.add_argument("--project", default="", help="only trials of this project (default: all)")
    trials.add_argument("--tracking", help="MLflow's URI, or the path of its sqlite file (default: ./mlflow.db)")
    trials.set_defaults(run=_trials)


def _promote_options(promote: argparse.ArgumentParser) -> None:
    promote.add_argument(
        "reference", metavar="MODEL", help="version to promote: models:/NAME@candidate, or models:/NAME/3"
    )
    promote.add_argument("--to", default="champion", metavar="ALIAS", help="the alias (default: %(default)s)")
    promote.add_argument(
        "--league",
        help="make a snapshot, also named main:7, champion of its league, if the league's gate lets it",
        **SWITCH,
    )  # fmt: skip
    promote.add_argument("--project", default="", help="with --league and main:7: only leagues of this project")
    trial_option(promote)
    promote.add_argument("--version", type=count, help="this version, of models:/NAME")
    gate_options(promote)
    promote.add_argument("--tracking", help="MLflow's URI, or the path of its sqlite file (default: ./mlflow.db)")
    promote.set_defaults(run=_promote)


def _scale_options(scale: argparse.ArgumentParser) -> None:
    scale.add_argument("trial", metavar="TRIAL", help="id or name of the trial")
    scale.add_argument("num_workers", metavar="WORKERS", type=count, help="how many it is to have from now on")
    scale.add_argument("--rollout", metavar="NAME", help="the component, of a job that has several")
    scale.add_argument("--tracking", help="MLflow's URI, or the path of its sqlite file (default: ./mlflow.db)")
    scale.add_argument(
        "--timeout-s", type=float, default=30.0, help="deadline for the job to take the request (default: %(default)s)"
    )
    scale.set_defaults(run=_scale)


def _completion_options(completion: argparse.ArgumentParser) -> None:
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run=_completion)


def _training_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE",
        help=SET,
    )  # fmt: skip
    parser.add_argument("--trial", help="name of the MLflow run; an interrupted one of that name is resumed")
    parser.add_argument("--new", help="start a new run even if there is one to resume", **SWITCH)
    parser.add_argument("--tracking", help="MLflow's URI, or the path of its sqlite file (default: ./mlflow.db)")
    parser.add_argument(
        "--cluster", nargs="?", const="", metavar="ADDRESS",
        help="run on Ray instead of in this process: join the cluster at ADDRESS (auto: this machine's), or start one",
    )  # fmt: skip
    parser.add_argument(
        "--ingress", choices=["haproxy", "serve"], default="haproxy",
        help="Serve's ingress when Ray is started here (default: %(default)s)",
    )  # fmt: skip


@contextlib.contextmanager
def _announced(config: str, interrupted: str) -> Iterator[None]:
    """Prints a line before the imports, which take seconds, and another one if an interrupt leaves no result.

    Args:
        config: the job's file.
        interrupted: line for an interrupt, unless the exception has a note.
    """
    try:
        print(f"{config}: checking the job ...", file=sys.stderr, flush=True)
        yield
    except KeyboardInterrupt as error:
        when = getattr(error, "__notes__", [interrupted])[0]
        print(f"brayx: interrupted {when}", file=sys.stderr, flush=True)
        raise


def _train(arguments: argparse.Namespace) -> int:
    with _announced(arguments.config, "before training began"):
        from brayx.hosts import train
        from brayx.jobs.config import JobConfig

        result = train(
            JobConfig.load(arguments.config, arguments.overrides),
            cluster=arguments.cluster,
            ingress=arguments.ingress,
            trial_name=arguments.trial,
            resume=not arguments.new,
            tracking=arguments.tracking,
        )
    print(result.summary())
    return 0 if result.finished else 130


def _demo(arguments: argparse.Namespace) -> int:
    with _announced(arguments.config, "before the demo was over"):
        from brayx.commands.demo import demo

        return demo(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    with _announced(arguments.config, "before it was served"):
        from brayx.jobs.config import JobConfig, only
        from brayx.local.serving import serve
        from brayx.tracking import tracking_uri

        job = JobConfig.load(arguments.config, arguments.overrides)
        models = {}
        for reference in arguments.models:
            name, named, version = reference.partition("=models:/")
            models[only("model", job.models, name if named else "")] = f"models:/{version}" if named else reference
        serve(
            job,
            tracking_uri(arguments.tracking or job.tracking.uri),
            actor=arguments.actor,
            models=models,
            trial=arguments.trial,
        )
    return 0


def _match(arguments: argparse.Namespace) -> int:
    with _announced(arguments.config, "before the first game"):
        from brayx.commands.match import match
        from brayx.jobs.config import JobConfig
        from brayx.tracking import tracking_uri

        job = JobConfig.load(arguments.config, arguments.overrides)
        result = match(
            job,
            arguments.a,
            arguments.b,
            uri=tracking_uri(arguments.tracking or job.tracking.uri),
            games=arguments.games,
            seed=arguments.seed,
            actor=arguments.actor,
            explore=arguments.explore,
            trial=arguments.trial,
            timeout_s=arguments.timeout_s,
        )
    print(json.dumps(result.as_dict()) if arguments.json else result)
    return 130 if result.interrupted else int(result.missing > 0)


def _export(arguments: argparse.Namespace) -> int:
    from brayx.commands.export import allowed, export, show

    report = export(
        arguments.reference,
        arguments.to,
        arguments.out,
        tracking=arguments.tracking,
        job=arguments.job,
        model=arguments.model,
        trust=arguments.trust,
        batch_sizes=arguments.batch_sizes,
    )
    show(report)
    if report["within"]:
        return 0
    missed = {name: of for name, of in report["runtimes"].items() if not of["within"]}
    beyond = [f"{name} ({allowed(of)})" for name, of in missed.items() if "error" not in of]
    failed = [name for name, of in missed.items() if "error" in of]
    for problem, names in (("beyond the tolerance", beyond), ("failed", failed)):
        if names:
            print(f"brayx: {problem}: {', '.join(names)}; the report has the errors", file=sys.stderr)
    return 1


def _promote(arguments: argparse.Namespace) -> int:
    from brayx.tracking import promote, tracking_uri

    uri = tracking_uri(arguments.tracking)
    if arguments.league:
        from brayx.league.promote import promote_in_league

        if arguments.to != "champion" or arguments.version is not None:
            raise ConfigError("--league cannot be combined with --to or --version: a league has one champion")
        passed(arguments, uri)
        entry, before, reason = promote_in_league(
            arguments.reference, uri, project=arguments.project, trial=arguments.trial
        )
        print(reason)
    else:
        passed(arguments, uri)
        entry, before = promote(arguments.reference, uri, to=arguments.to, version=arguments.version)
    was = "before it was none" if before is None else f"before it was version {before}"
    changed = f"is {arguments.to} now; {was}" if before != entry.version else f"is {arguments.to} already"
    print(f"{entry.name} version {entry.version} {changed}")
    return 0


def _scale(arguments: argparse.Namespace) -> int:
    from brayx.cluster.scale import scale

    done = scale(
        arguments.trial,
        arguments.num_workers,
        rollout=arguments.rollout,
        tracking=arguments.tracking,
        timeout_s=arguments.timeout_s,
    )
    print(f"workers of rollout {done.rollout!r}: {done.now} from now on; before, {done.before}")
    return 0


def _new_project(arguments: argparse.Namespace) -> int:
    from brayx.commands.new import new_project

    for file in new_project(arguments.name, arguments.template):
        print(file)
    # In its folder: there mlflow.db is to be, as its README has it.
    print(f"next: cd {arguments.name} && brayx train {arguments.name}.yaml")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from brayx.jobs.checks import check_files, check_learning
    from brayx.jobs.code import check_code
    from brayx.jobs.config import JobConfig
    from brayx.jobs.options import documented
    from brayx.jobs.sources import Opened

    job = JobConfig.load(arguments.config, arguments.overrides)
    check_code(job, job.actors, mode="train")
    opened: Opened = {}
    check_files(job, opened)
    if len(job.trainers) == 1:
        check_learning(job, opened)
    print_result(documented(job), end="")
    if job.rollouts:
        from brayx.jobs.environments import lag_notes

        for note in lag_notes(job):
            print(f"brayx: note: {note}", file=sys.stderr)
    print(f"{arguments.config}: ok", file=sys.stderr)
    return 0


def _trials(arguments: argparse.Namespace) -> int:
    from brayx.tracking import tracking_uri
    from brayx.tracking.finding import NEWEST
    from brayx.tracking.trials import table, trials

    rows = trials(tracking_uri(arguments.tracking), arguments.project)
    print_result(table(rows))
    if len(rows) == NEWEST:
        print(f"only the newest {NEWEST:,} are listed; --project lists those of one project", file=sys.stderr)
    return 0


def _completion(arguments: argparse.Namespace) -> int:
    modules = {name: module for name, (module, _) in OWN.items()}
    modules |= {f"gamecore {kind}": f"brayx.bridges.{kind}" for kind in GAMECORES}
    own = {words: importlib.import_module(module).parser() for words, module in modules.items()}
    print(script(_parser(), arguments.shell, own), end="")
    return 0


if __name__ == "__main__":
    run()
