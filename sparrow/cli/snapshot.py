"""``sparrow snapshot``: saved positions of subscriptions; ``sparrow seek SUB NAME`` comes back to one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.cli.output import Column, instant, print_done, print_json, print_rows, reflow
from sparrow.cli.target import Data, Json, Url, Wide, opened
from sparrow.cli.values import parse_span

if TYPE_CHECKING:
    from sparrow.client.blocking import BlockingBroker

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The snapshot's name.")]


@app.command(epilog="Example: sparrow snapshot create billing before-deploy --ttl 2d")
def create(
    subscription: Annotated[str, typer.Argument(metavar="SUB", help="The subscription.")],
    name: Name,
    ttl: Annotated[str, typer.Option(metavar="SPAN", help="How long it is kept, seven days at most.")] = "7d",
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Save where a subscription is."""
    with opened(url, data) as broker:
        broker.subscription(subscription).snapshot(name, ttl_s=parse_span(ttl))
        (found,) = [each for each in _all(broker) if each["name"] == name]
    if as_json:
        print_json(found)
    else:
        print_done(f"saved {name}; `sparrow seek {subscription} {name}` comes back until {found['expires']}")


@app.command("list", epilog="Example: sparrow snapshot list")
def list_(url: Url = None, data: Data = None, as_table: Wide = False, as_json: Json = False) -> None:
    """List the snapshots that have not expired."""
    with opened(url, data) as broker:
        found = _all(broker)
    if as_json:
        print_json(found)
        return
    titles = ("name", "subscription", "created", "expires")
    rows = [tuple(each[title] for title in titles) for each in found]
    print_rows([Column(title) for title in titles], rows, as_table=as_table, nothing="no snapshots")


@app.command(epilog="Example: sparrow snapshot delete before-deploy")
def delete(name: Name, url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """Forget a snapshot; the subscription stays where it is."""
    with opened(url, data) as broker:
        broker.delete_snapshot(name)
    if as_json:
        print_json({"deleted": name})
    else:
        print_done(f"deleted {name}")


def _all(broker: BlockingBroker) -> list[dict[str, Any]]:
    names = {each.id: each.name for each in broker.subscriptions()}
    return [
        {
            "name": each.name,
            "subscription": names.get(each.subscription_id),
            "created": instant(each.created_at_us),
            "expires": instant(each.expires_at_us),
        }
        for each in broker.snapshots()
    ]


reflow(app)
