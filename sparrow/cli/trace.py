"""``sparrow trace``: where a message is, in every subscription that reads its topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.cli.output import Column, instant, number, plain, print_json, print_rows, reflow
from sparrow.cli.target import Data, Json, Url, Wide, opened

if TYPE_CHECKING:
    from sparrow.kernel.trace import Trace

app = typer.Typer()


@app.command(epilog="Example: sparrow trace 12-0-4711")
def trace(
    message_id: Annotated[str, typer.Argument(metavar="MESSAGE_ID", help="As in a receipt: 12-0-4711.")],
    url: Url = None,
    data: Data = None,
    as_table: Wide = False,
    as_json: Json = False,
) -> None:
    """Tell where a message is: acked, leased to whom and until when, waiting for what, dead."""
    with opened(url, data) as broker:
        found = broker.trace(message_id)
    if as_json:
        print_json([_fields(each) for each in found])
        return
    columns = (
        Column("subscription", is_folded=True),
        Column("state"),
        number("failed_attempts"),
        Column("consumer"),
        Column("until"),
        Column("why", is_folded=True),
    )
    rows = [
        (
            each.subscription,
            str(each.state),
            each.attempts,
            each.consumer,
            instant(each.deadline_us or each.due_at_us),
            each.reason or " ".join(map(str, each.waits_for)),
        )
        for each in found
    ]
    print_rows(columns, rows, as_table=as_table, nothing="stored, and read by no subscription")


def _fields(found: Trace) -> dict[str, Any]:
    """The trace as JSON shows it; ids are texts."""
    fields: dict[str, Any] = plain(found)
    return {
        **fields,
        "message_id": str(found.message_id),
        "state": str(found.state),
        "waits_for": [str(each) for each in found.waits_for],
    }


reflow(app)
