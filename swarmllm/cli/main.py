"""The command group: names and one-line helps are here, each command's code is imported when it is called.

click would import every command to print its group help; rich and httpx alone cost more than the rest of
`swarmllm --help`. So the table below carries the short helps, and a test compares it with the commands
themselves.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import click

from swarmllm import __version__


@dataclass(frozen=True, slots=True)
class LazyCommand:
    module: str
    short_help: str


COMMANDS = {
    "daemon": LazyCommand("swarmllm.cli.daemon", "Run a node on this machine until Ctrl-C."),
    "bootstrap": LazyCommand(
        "swarmllm.cli.bootstrap_node", "Run a node without models that others find each other by."
    ),
    "status": LazyCommand("swarmllm.cli.status", "Show what the node is doing."),
    "top": LazyCommand("swarmllm.cli.top", "Watch nodes, pipelines, tokens per second and memory."),
    "doctor": LazyCommand("swarmllm.cli.doctor", "Look for what keeps this node from working well."),
    "logs": LazyCommand("swarmllm.cli.logs", "Show what the node has written to its log."),
    "peers": LazyCommand("swarmllm.cli.peers", "Show the nodes this one is connected to."),
    "plan": LazyCommand("swarmllm.cli.plan", "Show the route a request would take, and why."),
    "invite": LazyCommand("swarmllm.cli.network", "Make a string with which others can join."),
    "join": LazyCommand("swarmllm.cli.network", "Join the swarm that an invitation is for."),
    "network": LazyCommand("swarmllm.cli.network", "Make the swarm private; change its key."),
    "models": LazyCommand("swarmllm.cli.models", "List, find, add, fetch, load, check and remove models."),
    "share": LazyCommand("swarmllm.cli.share", "Share a model out over the nodes of the swarm."),
    "unshare": LazyCommand("swarmllm.cli.share", "End sharing a model; the nodes drop their parts."),
    "chat": LazyCommand("swarmllm.cli.chat.command", "Talk to a model, or ask it one question."),
    "run": LazyCommand("swarmllm.cli.run", "Answer one prompt; made for pipes."),
    "bench": LazyCommand("swarmllm.cli.bench", "Measure how fast the node answers."),
    "config": LazyCommand("swarmllm.cli.config", "Show and check the configuration."),
    "key": LazyCommand("swarmllm.cli.key", "Create, list and revoke API keys."),
    "service": LazyCommand("swarmllm.cli.service", "Run the node as a systemd service."),
    "version": LazyCommand("swarmllm.cli.version", "Show the installed version; compare it with an index's."),
    "completion": LazyCommand("swarmllm.cli.completion", "Print a script for tab completion."),
    "demo": LazyCommand(
        "swarmllm.cli.demo", "Start three nodes here, ask the bundled model, show the route."
    ),
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name].module), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.short_help) for name, command in COMMANDS.items()])


EPILOG = """\b
Examples:
  swarmllm demo                                see it work on this machine
  swarmllm daemon --load guide                 serve the bundled model
  swarmllm chat "What is a pipeline?"          ask the running node
  swarmllm models load guide --layers 0:4      serve a part of a model
  swarmllm daemon --bootstrap /ip4/192.0.2.7/tcp/8810/p2p/12D3KooW...

\b
Exit codes:
  0 done  1 failed  2 wrong usage  3 no daemon answers  4 the daemon refused
  5 a newer version is there (version --check)
"""


@click.command(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="swarmllm")
def main() -> None:
    """Run large language models across the machines you own or share.

    A node is one running daemon. Nodes that know each other form a swarm; each serves some layers of some
    models, and a request walks from node to node until it has seen every layer.

    Commands with --api talk to a running node: the one named by it or by SWARMLLM_API, else the one that
    was started with the default data folder.
    """
