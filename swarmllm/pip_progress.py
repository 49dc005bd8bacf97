"""Reads pip's progress from its verbose output.

pip shows nothing while it compiles, and everything when asked to be verbose; this turns the second into one
line with a bar, a rate and the time left. Pure: lines and the time come in, words come out. Part of the
bootstrap, so standard library only.
"""

from __future__ import annotations

import re
from pathlib import Path

BIG_DOWNLOAD_BYTES = 10_000_000


class PipProgress:
    """Fed line by line; `label`, `done`, `total` and `unit` say what goes on now, `line` in one line."""

    def __init__(self, now_s: float) -> None:
        self.label = "starting pip"
        self.done = 0
        self.total = 0
        self.unit = ""
        self.since_s = now_s
        self.n_to_install = 0
        self._build_started_s: dict[str, float] = {}
        self._download = ""

    def _now_doing(self, label: str, now_s: float, unit: str = "") -> None:
        self.label, self.done, self.total, self.unit, self.since_s = label, 0, 0, unit, now_s

    def feed(self, line: str, now_s: float) -> str | None:
        """Returns a sentence when something has happened that is worth keeping on the screen."""
        text = line.strip()
        progress = re.fullmatch(r"Progress (\d+) of (\d+)", text)
        if progress:
            self.done, self.total = int(progress[1]), int(progress[2])
            return self._download_line(now_s) if self._download and self.done == self.total else None
        step = re.match(r"\[(\d+)/(\d+)\] (.*)", text) or re.match(r"\[ *(\d+)(%)\] (.*)", text)
        if step:
            self._build_step(int(step[1]), 100 if step[2] == "%" else int(step[2]), step[3])
            return None
        collecting = re.match(r"(?:Collecting|Requirement already satisfied:|Processing) ([\w.-]+)", line)
        if collecting:
            self._now_doing(f"resolving {collecting[1]}", now_s)
            return None
        downloading = re.match(r"Downloading (\S+?)(\.metadata)? \(", text)
        if downloading and not downloading[2]:
            self._download = downloading[1]
            self._now_doing(f"downloading {downloading[1]}", now_s, "B")
            return None
        built = re.match(
            r"Building (?:wheel|editable) for (\S+) \(.*\): (started|finished with status '(\w+)')", text
        )
        if built:
            return self._build_line(built[1], built[3], now_s)
        installing = re.match(r"Installing collected packages: (.*)", line)
        if installing:
            self.n_to_install = len(installing[1].split(","))
            self._now_doing(f"installing {self.n_to_install} packages", now_s)
        return None

    def _download_line(self, now_s: float) -> str | None:
        line = f"downloaded {self._download} ({size(self.total)}) in {duration(now_s - self.since_s)}"
        is_big = self.total >= BIG_DOWNLOAD_BYTES
        self._now_doing(f"reading {self._download}", now_s)
        self._download = ""
        return line if is_big else None

    def _build_step(self, done: int, total: int, command: str) -> None:
        if total < 20 or "building" not in self.label:
            return  # a small sub-project, or cmake re-running itself: a bar would jump
        source = re.search(r" -c (\S+)$", command) or re.search(r"Building \w+ object (\S+?)(\.o)?$", command)
        self.done, self.total, self.unit = done, total, "steps"
        self.label = self.label.split(":")[0] + (f": {Path(source[1]).name}" if source else ": linking")

    def _build_line(self, name: str, status: str | None, now_s: float) -> str | None:
        if status is None:
            self._build_started_s[name] = now_s
            self._now_doing(f"building {name}", now_s)
            return None
        took = duration(now_s - self._build_started_s.get(name, now_s))
        self._now_doing("collecting the rest", now_s)
        return f"built {name} in {took}" if status == "done" else f"building {name} failed after {took}"

    def line(self, now_s: float) -> str:
        """One line: what, a bar where there is a total, how fast, how long still."""
        elapsed_s = now_s - self.since_s
        if not self.total:
            return f"{self.label} ... {duration(elapsed_s)}"
        done = min(self.done, self.total)
        filled = 24 * done // self.total
        parts = ["█" * filled + "░" * (24 - filled), f"{100 * done // self.total:3d} %"]
        if self.unit == "B":
            parts.append(f"{size(done)} of {size(self.total)}")
        elif self.unit:
            parts.append(f"{done}/{self.total}")
        if 0 < done < self.total and elapsed_s > 3:
            parts.append(f"{duration(elapsed_s * (self.total - done) / done)} left")
        return "  ".join([*parts, self.label])


def size(n_bytes: float) -> str:
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes < 1e9 else f"{n_bytes / 1e9:.2f} GB"


def duration(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}:{whole % 60:02d} min"
