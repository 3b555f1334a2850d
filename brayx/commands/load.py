"""``brayx load``: `brayx.gamecore.load` plays the sessions."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from brayx.command_line import print_result

HELP = "play many sessions at a service: latency by phase, errors, the point of saturation"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    from brayx.gamecore.auth import add_options

    parser.add_argument("url", help="a door: http://host:port, ws://…, tcp://… or grpc://…")
    parser.add_argument("--sessions", type=int, default=100, help="sessions at once (default: %(default)s)")
    parser.add_argument("--ramp", type=float, default=10.0, metavar="S", help="seconds to start them in (default: 10)")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="seconds to play then (default: 10)")
    parser.add_argument("--rate", type=float, default=10.0, help="ticks a second of each session (default: 10)")
    parser.add_argument("--body", type=Path, metavar="FILE", help="body of every tick (default: {})")
    parser.add_argument("--start", type=Path, metavar="FILE", help="body of every start, such as a contract")
    parser.add_argument("--limit-ms", type=float, default=100.0, help="a longer tick is late (default: 100)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the result there, as JSON")
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plays and prints; exit code 1 if there were errors."""
    import asyncio

    from brayx.errors import ConfigError
    from brayx.gamecore.auth import credentials
    from brayx.gamecore.load import LoadPlan, play_load
    from brayx.tables import aligned

    if arguments.sessions < 1 or arguments.rate <= 0 or arguments.ramp < 0 or arguments.seconds < 0:
        raise ConfigError("--sessions and --rate must be positive, --ramp and --seconds not negative")
    plan = LoadPlan(
        url=arguments.url,
        sessions=arguments.sessions,
        ramp_s=arguments.ramp,
        seconds=arguments.seconds,
        rate=arguments.rate,
        start=b"" if arguments.start is None else arguments.start.read_bytes(),
        tick=b"{}" if arguments.body is None else arguments.body.read_bytes(),
        limit_s=arguments.limit_ms / 1e3,
        credentials=credentials(arguments.keys_file, arguments.key),
    )
    result = {"plan": plan.as_dict(), **asyncio.run(play_load(plan)).as_dict()}
    rows = [("phase", "answered", "p50 ms", "p90 ms", "p99 ms", "max ms", "errors")]
    for phase, measured in result["phases"].items():
        ms = measured["ms"]
        times = [f"{ms[name]:.1f}" if ms else "-" for name in ("p50", "p90", "p99", "max")]
        errors = ", ".join(f"{code} {count}" for code, count in measured["errors"].items()) or "-"
        rows.append((phase, str(measured["answered"]), *times, errors))
    print_result("\n".join(aligned(rows)))
    at, ticks = result["saturated_at"], result["phases"]["tick"]["answered"]
    late = f"one tick in a hundred is later than {arguments.limit_ms:g} ms or fails, for three seconds"
    if ticks:
        print(f"{late}: {'never' if at is None else f'from {at} sessions on'}")
    if arguments.record is not None:
        arguments.record.write_text(json.dumps(result, indent=1))
    return int(any(measured["errors"] for measured in result["phases"].values()))
