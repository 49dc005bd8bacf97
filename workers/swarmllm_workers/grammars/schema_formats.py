"""Formats of JSON strings as they are enforced: by llguidance, or by a pattern that says less. Pure."""

from __future__ import annotations

from typing import Final

ENFORCED: Final = frozenset(("duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""By llguidance, and never with a text that validators refuse."""
SYNONYMS: Final = {
    "idn-email": "email",
    "iri": "uri",
    "iri-reference": "uri",
    "uri-reference": "uri",
}
"""Each is enforced as a narrower one."""

_DAY: Final = r"((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
"""Month and day that every year has."""
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_YEAR: Final = r"(19|20)[0-9]{2}"
PATTERNS: Final = {
    "date": f"^{_YEAR}-{_DAY}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_YEAR}-{_DAY}T{_TIME}$",
    "idn-hostname": r"^[a-z]{1,20}(\.[a-z]{2,10}){0,3}$",
    "json-pointer": r"^(/[a-zA-Z0-9_]*)*$",
    "relative-json-pointer": r"^(0|[1-9][0-9]{0,3})(/[a-zA-Z0-9_]+)*$",
    "regex": r"^[a-zA-Z0-9 ]*$",
    "uri-template": r"^[a-zA-Z0-9/]*$",
}
"""For formats in which llguidance is wrong or that it does not know. February 29 is missing."""
