"""`swarmllm completion`: the script that teaches a shell to complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from swarmllm.cli.display import print_json
from swarmllm.cli.options import json_option

VARIABLE = "_SWARMLLM_COMPLETE"


@click.command(
    short_help="Print a script for tab completion.",
    epilog="""\b
Examples:
  eval "$(swarmllm completion bash)"            in ~/.bashrc
  eval "$(swarmllm completion zsh)"             in ~/.zshrc
  swarmllm completion fish > ~/.config/fish/completions/swarmllm.fish
""",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@json_option
def completion(shell: str, as_json: bool) -> None:
    """Print a script that makes SHELL complete the commands and options of this program."""
    from swarmllm.cli.main import main

    kind = get_completion_class(shell)
    assert kind is not None
    complete = kind(main, {}, "swarmllm", VARIABLE)
    # Not source(): for bash it would ask some other bash for its version.
    script = complete.source_template % complete.source_vars()
    if as_json:
        print_json({"shell": shell, "script": script})
    else:
        click.echo(script)
