"""The `zeor` command: finds the subcommand, and the nearest name where there is none.

Each subcommand has a function that adds its arguments to a parser, and one that runs with the options read.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from importlib.metadata import PackageNotFoundError, version

from zeor.tools import checkpoints, plan, train
from zeor.tools.importers import command

COMMANDS = {
    "train": (train.add_arguments, train.run, "train a small GPT on local ranks and show what sharding saves"),
    "plan": (plan.add_arguments, plan.run, "bytes per rank and role, before anything is allocated"),
    "schedule": (plan.add_schedule_arguments, plan.run_schedule, "the actions of one training step"),
    "inspect": (
        checkpoints.add_inspect_arguments, checkpoints.run_inspect, "what a checkpoint holds, and whether it is sound",
    ),
    "export": (checkpoints.add_export_arguments, checkpoints.run_export, "plain safetensors out of a checkpoint"),
    "import": (command.add_arguments, command.run, "a checkpoint of PyTorch, DeepSpeed or DCP, made one of zeor's"),
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    parser, subparsers = _parsers()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        parser.error(f"there is no command {arguments[0]!r}{_nearest(arguments[0], list(COMMANDS))}")
    options, unknown = parser.parse_known_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    if unknown:
        subparser = subparsers[options.command]
        known = [name for action in subparser._actions for name in action.option_strings]
        subparser.error(f"there is no option {unknown[0]}{_nearest(unknown[0].split('=')[0], known)}")
    try:
        return COMMANDS[options.command][1](options)
    except KeyboardInterrupt:
        print(f"zeor {options.command}: interrupted.", file=sys.stderr)
        return train.EXIT_CODE
    except BrokenPipeError:  # whoever reads the output (head, a pager) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes when it ends
        return 0


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(prog="zeor", description="ZeRO for PyTorch.")
    parser.add_argument("--version", action="version", version=f"zeor {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    subparsers = {}
    for name, (add_arguments, _, summary) in COMMANDS.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        subparsers[name] = commands.add_parser(name, help=summary, description=description)
        add_arguments(subparsers[name])
    return parser, subparsers


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"


def _version() -> str:
    try:
        return version("zeor")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    raise SystemExit(main())
