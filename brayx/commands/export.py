"""``brayx export``: `brayx.jobs.export` writes the files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from brayx.command_line import count, print_result
from brayx.commands.arguments import add_tracking, add_trust

HELP = "write a model for other runtimes or for a game engine, and compare it"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("reference", metavar="MODEL", help="models:/NAME@ALIAS, runs:/TRIAL, or a checkpoint's folder")
    written = parser.add_mutually_exclusive_group(required=True)
    written.add_argument(
        "--to", nargs="+", choices=["onnx", "int8", "tensorrt"], metavar="RUNTIME",
        help="onnx, int8, tensorrt: one or several",
    )  # fmt: skip
    written.add_argument(
        "--layout", choices=["godot", "unity"],
        help="write the ONNX file that this engine's own inference loads, for a model with a contract",
    )  # fmt: skip
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    add_tracking(parser)
    parser.add_argument("--job", help="YAML of the job that made it (default: as the checkpoint has it)")
    add_trust(parser)
    parser.add_argument(
        "--model", metavar="NAME",
        help="the model component, if the job has several and neither the version's name nor the trainer says which",
    )  # fmt: skip
    parser.add_argument(
        "--batch-sizes", nargs="+", type=count, default=[1, 8, 64], metavar="N",
        help="to compare and to time at (default: 1 8 64)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Exports, and prints the report; returns 1 if a runtime failed or is beyond its tolerance."""
    from brayx.jobs.export import allowed, export, export_layout, show

    origin = {name: getattr(arguments, name) for name in ("tracking", "job", "model", "trust")}
    if arguments.layout is not None:
        print_result(export_layout(arguments.reference, arguments.layout, arguments.out, **origin))
        return 0
    report = export(arguments.reference, arguments.to, arguments.out, batch_sizes=arguments.batch_sizes, **origin)
    show(report)
    if report["within"]:
        return 0
    missed = {name: runtime for name, runtime in report["runtimes"].items() if not runtime["within"]}
    beyond = [f"{name} ({allowed(runtime)})" for name, runtime in missed.items() if "error" not in runtime]
    failed = [name for name, runtime in missed.items() if "error" in runtime]
    for problem, names in (("beyond the tolerance", beyond), ("failed", failed)):
        if names:
            print(f"brayx: {problem}: {', '.join(names)}; the report has the errors", file=sys.stderr)
    return 1
