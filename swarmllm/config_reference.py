"""docs/configuration.md, written from the tables of `swarmllm.config`.

python -m swarmllm.config_reference > docs/configuration.md
"""

from __future__ import annotations

import msgspec

from swarmllm.config import TABLES, keys_of


def reference() -> str:
    """docs/configuration.md, drawn from the tables of swarmllm/config.py."""
    lines = [
        "# Configuration",
        "",
        "Generated from `swarmllm/config.py` by `python -m swarmllm.config_reference`; a test compares.",
        "",
        "Settings come from, later ones winning: the defaults below, a TOML file (`--config`, else",
        "`~/.config/swarmllm/config.toml` (XDG_CONFIG_HOME) if it exists), the environment",
        "(`SWARMLLM_<TABLE>_<KEY>`, lists separated by commas), command-line flags.",
        "An unknown key is an error.",
        "",
        "A running daemon reads all of them again when it gets SIGHUP (`systemctl reload`, `kill -HUP`).",
        "Those with a yes count at once; a change of another is told in the log and counts after a restart.",
    ]
    for table, kind in TABLES.items():
        lines += ["", f"## [{table}]", "", (kind.__doc__ or "").strip(), ""]
        lines += ["| key | default | SIGHUP | meaning |", "|---|---|---|---|"]
        for key, field in keys_of(table).items():
            default = msgspec.json.encode(field.default).decode()
            at_once = "yes" if field.metadata["reload"] else ""
            lines.append(f"| `{key}` | `{default}` | {at_once} | {field.metadata['doc']} |")
    example = ["[node]", 'nickname = "kitchen"', "", "[network]"]
    example += ['bootstrap = ["/ip4/192.0.2.7/tcp/8810/p2p/12D3KooW..."]', ""]
    example += ["[model]", 'load = ["guide:0:4"]']
    return "\n".join([*lines, "", "## Example", "", "```toml", *example, "```", ""])


if __name__ == "__main__":
    print(reference(), end="")
