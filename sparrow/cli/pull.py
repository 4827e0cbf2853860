"""``sparrow pull``: takes messages of a subscription, prints them, and acks what was printed.

A message is acked only after its line has left this process, so an interrupted pull loses nothing; what was
handed over and not printed goes back at once, without a counted attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sparrow.cli.messages import Format, chosen_format, print_messages
from sparrow.cli.output import is_terminal, reflow
from sparrow.cli.target import Data, Json, Url, opened
from sparrow.cli.values import parse_span

if TYPE_CHECKING:
    from sparrow.client.subscription import BlockingSubscription

app = typer.Typer()

_PORTION = 1000
_NEXT_S = 0.1
"""After the first messages, how long to wait for those that are on their way."""
_FOLLOW_S = 1.0


@app.command(epilog="Example: sparrow pull billing --max 10 --timeout 5s --json")
def pull(
    name: Annotated[str, typer.Argument(metavar="SUB", help="The subscription's name.")],
    max_: Annotated[int, typer.Option("--max", "-n", min=1, help="Messages at most.")] = 100,
    timeout: Annotated[str, typer.Option(metavar="SPAN", help="How long to wait for the first.")] = "1s",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    ack: Annotated[bool, typer.Option("--ack/--no-ack", help="Ack what was printed, or put it back.")] = True,
    member: Annotated[
        str | None, typer.Option(metavar="NAME", help="Join the subscription's group under this name.")
    ] = None,
    form: Annotated[Format | None, typer.Option("--format", help="How messages are printed; text.")] = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Take messages of a subscription, print them, and ack them.

    Text is one line a message: id, time, topic, key, attributes and data, between tabs in a pipe. JSON is
    one object a line. Raw is the data alone and a newline.
    """
    chosen, timeout_s = chosen_format(form, as_json), parse_span(timeout)
    with opened(url, data) as broker:
        handle: BlockingSubscription = broker.subscription(name)
        if member is not None:
            handle = handle.join(member)
        try:
            _take(handle, None if follow else max_, timeout_s, is_acked=ack, form=chosen)
        finally:
            handle.close()


def _take(
    handle: BlockingSubscription, max_: int | None, timeout_s: float, *, is_acked: bool, form: Format
) -> None:
    taken = 0
    while max_ is None or taken < max_:
        wait_s = _FOLLOW_S if max_ is None else _NEXT_S if taken else timeout_s
        room = _PORTION if max_ is None else min(_PORTION, max_ - taken)
        messages = handle.pull(room, wait_s)
        if not messages and max_ is not None:
            break
        print_messages(messages, form)
        if is_acked:
            handle.ack(messages)
        taken += len(messages)
    if is_acked:
        handle.flush()
    if not taken and is_terminal() and form is Format.TEXT:
        typer.echo("no messages", err=True)


reflow(app)
