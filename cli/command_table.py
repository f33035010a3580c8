"""The subcommands of `shoal`: what each does, and its module, imported only when it is chosen."""

import argparse
from typing import Protocol

SUMMARIES = {
    "demo": "kill a peer in the middle of a story, and see the story continue",
    "serve": "run a peer that hosts blocks of a model",
    "swarm-new": "create the join code of a new swarm",
    "revoke": "remove peers from a private swarm",
    "swarm": "run a whole swarm on this machine until Ctrl-C",
    "generate": "generate text with a swarm",
    "chat": "talk with a model over a swarm",
    "finetune": "fine-tune a model with your own data through a swarm",
    "train": "train a model from scratch",
    "export": "write the model of a training run that goes on, or is over",
    "train-plan": "tell what a training run needs, before anyone joins",
    "publish": "publish an adapter to a swarm until Ctrl-C",
    "models": "list the models that a swarm serves",
    "monitor": "watch the health of a swarm, on a web page or once",
    "top": "watch the health of a swarm on the terminal",
    "peers": "list the peers on this machine",
    "drain": "have a peer on this machine serve nothing for a while",
    "resume": "have a drained peer serve again",
    "limits": "show or change how much a peer on this machine gives",
    "doctor": "find out what is broken in a swarm, and how to fix it",
    "bench": "benchmark a running swarm from this machine",
}
"""All subcommands, in the order of `shoal --help`."""


class Command(Protocol):
    """The module of a subcommand."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser, /) -> None:
        """Declare its options."""
        ...

    @staticmethod
    def run(options: argparse.Namespace, /) -> int:
        """Do what it is for; return the exit code."""
        ...


def load_command(name: str) -> Command:
    """Import the module of a subcommand, and none of another: `shoal --help` is instant."""
    match name:
        case "bench":
            from .benchmarking import bench as command
        case "chat":
            from .commands import chat as command
        case "demo":
            from .commands import demo as command
        case "doctor":
            from .commands import doctor as command
        case "drain":
            from .operating import drain as command
        case "export":
            from .training import export as command
        case "finetune":
            from .commands import finetune as command
        case "generate":
            from .commands import generate as command
        case "limits":
            from .operating import limits as command
        case "models":
            from .commands import models as command
        case "monitor":
            from .monitoring import monitor as command
        case "peers":
            from .operating import peers as command
        case "publish":
            from .commands import publish as command
        case "resume":
            from .operating import resume as command
        case "revoke":
            from .commands import revoke as command
        case "serve":
            from .commands import serve as command
        case "swarm":
            from .commands import swarm as command
        case "swarm-new":
            from .commands import swarm_new as command
        case "top":
            from .monitoring import top as command
        case "train":
            from .training import train as command
        case "train-plan":
            from .training import train_plan as command
        case _:
            raise LookupError(f"no subcommand is called {name!r}")
    return command
