"""``sparrow token``: who may do what. A token's text is printed once, when it is made."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sparrow.cli.output import (
    Column,
    confirm,
    instant,
    is_terminal,
    print_done,
    print_json,
    print_rows,
    reflow,
)
from sparrow.cli.target import TOKEN_VARIABLE, Data, Json, Url, Wide, Yes, opened
from sparrow.cli.values import parse_span
from sparrow.model.access import TokenInfo

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="What logs and quotas call its holder.")]


@app.command(epilog="Example: sparrow token create shop --role publisher --topics 'orders.#' --expires 90d")
def create(
    name: Name,
    role: Annotated[
        str | None, typer.Option(help="read-only, publisher, subscriber or admin.", show_default=False)
    ] = None,
    topics: Annotated[str, typer.Option(metavar="PATTERN", help="The topics that the role is for.")] = "#",
    scope: Annotated[
        list[str] | None,
        typer.Option(metavar="SCOPE", help="Instead of a role: publish:orders.#; may be repeated."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="SPAN", help="How long it is good: 90d.", show_default="for ever")
    ] = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Make a token. Its text is printed now and cannot be shown again."""
    with opened(url, data) as broker:
        made = broker.create_token(
            name,
            scopes=scope or None,
            role=role,
            topics=topics,
            expires_in_s=None if expires is None else parse_span(expires),
        )
    if as_json:
        print_json({"token": made.text, **_fields(made.info)})
        return
    typer.echo(made.text)
    if is_terminal():
        typer.echo(f"Keep it: only its digest is stored. Clients take it from {TOKEN_VARIABLE}.", err=True)


@app.command("list", epilog="Example: sparrow token list")
def list_(url: Url = None, data: Data = None, as_table: Wide = False, as_json: Json = False) -> None:
    """List the tokens, without their secrets."""
    with opened(url, data) as broker:
        found = [_fields(info) for info in broker.tokens()]
    if as_json:
        print_json(found)
        return
    rows = [
        (each["name"], each["id"], " ".join(each["scopes"]), each["created"], each["expires"])
        for each in found
    ]
    columns = [
        Column("name"),
        Column("id"),
        Column("scopes", is_folded=True),
        Column("created"),
        Column("expires"),
    ]
    print_rows(columns, rows, as_table=as_table, nothing="no tokens: everybody may do everything")


@app.command(epilog="Example: sparrow token revoke shop")
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The token's name, or its id.")],
    yes: Yes = False,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """End a token at once, also on connections that are open."""
    confirm(f"Revoke {name}? Its holders are refused from then on.", is_sure=yes, as_json=as_json)
    with opened(url, data) as broker:
        info = broker.revoke_token(name)
    if as_json:
        print_json({"revoked": info.name, "id": info.id})
    else:
        print_done(f"revoked {info.name}")


@app.command(epilog="Example: sparrow token audit --limit 20")
def audit(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Entries at most, the newest last.")] = 100,
    url: Url = None,
    data: Data = None,
    as_table: Wide = False,
    as_json: Json = False,
) -> None:
    """Show what was changed over the network, by whom, and what was refused."""
    import msgspec

    with opened(url, data) as broker:
        found = [msgspec.to_builtins(entry) for entry in broker.audit_log(limit)]
    if as_json:
        print_json(found)
        return
    titles = ("at", "who", "action", "what", "outcome")
    rows = [tuple(each[title] for title in titles) for each in found]
    print_rows([Column(title) for title in titles], rows, as_table=as_table, nothing="nothing was changed")


def _fields(info: TokenInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "id": info.id,
        "scopes": [str(scope) for scope in info.scopes],
        "created": instant(info.created_at_us),
        "expires": instant(info.expires_at_us),
    }


reflow(app)
