"""``sparrow seek``: puts a subscription elsewhere in its log."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any

import typer

from sparrow.cli.output import count, print_done, print_json, reflow
from sparrow.cli.target import Data, Json, Url, opened
from sparrow.cli.values import TIME_HINT, is_time, parse_time
from sparrow.model.errors import InvalidArgument

app = typer.Typer()

_PLACE = re.compile(r"([^\s/=]+)(?:/(\d+))?=(\d+)\Z")
_SNAPSHOT = "snapshot:"


@app.command(
    epilog="Examples: sparrow seek billing '2h ago'; sparrow seek billing orders.us/0=1200 orders.us/1=900"
)
def seek(
    name: Annotated[str, typer.Argument(metavar="SUB", help="The subscription's name.")],
    target: Annotated[
        list[str],
        typer.Argument(metavar="TARGET...", help="earliest, latest, a time, a snapshot, or offsets."),
    ],
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Put a subscription elsewhere: what lies behind the target counts as done, what lies ahead comes again.

    A target is earliest, latest, a time (2026-07-01T12:00:00Z, 2h ago), the name of a snapshot
    (snapshot:NAME when it could be a time), or one or more of TOPIC/PARTITION=OFFSET.
    """
    place = parse_target(target)
    with opened(url, data) as broker:
        handle = broker.subscription(name)
        before = handle.lag()
        handle.seek(place)
        after = handle.lag()
    if as_json:
        print_json({"subscription": name, "target": " ".join(target), "lag_before": before, "lag": after})
    else:
        print_done(f"{name} is at {' '.join(target)}; {count(after, 'message')} to go, {before:,} before")


def parse_target(words: list[str]) -> Any:
    """What ``seek`` of a subscription takes."""
    places = [_PLACE.match(word) for word in words]
    if all(places):
        return {(match[1], int(match[2] or 0)): int(match[3]) for match in places if match is not None}
    text = " ".join(words)  # "2h ago" without quotes is two words.
    if text in ("earliest", "latest"):
        return text
    if text.startswith(_SNAPSHOT):
        return text.removeprefix(_SNAPSHOT)
    if is_time(text):
        moment: datetime = parse_time(text)
        return moment
    if " " in text or "=" in text:
        raise InvalidArgument(
            f"{text!r} is not a place to seek to",
            hint=f"Give earliest, latest, a snapshot's name, TOPIC/PARTITION=OFFSET or a time. {TIME_HINT}",
        )
    return text


reflow(app)
