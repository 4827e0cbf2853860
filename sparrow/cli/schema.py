"""``sparrow topic schema``: what the payloads of a topic are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sparrow.cli.output import confirm, print_done, print_json, reflow
from sparrow.cli.target import Data, Json, Url, Yes, opened
from sparrow.model.errors import InvalidArgument, SchemaNotFound
from sparrow.model.schema import SchemaType, TopicSchema

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name, as in orders.us.")]


@app.command("set", epilog="Example: sparrow topic schema set orders order.avsc --type avro")
def set_(
    name: Name,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A JSON Schema, an Avro schema or Protobuf descriptors.")
    ],
    type_: Annotated[SchemaType, typer.Option("--type", help="How payloads are written.")],
    message: Annotated[str, typer.Option(help="The Protobuf message, as in shop.Order.")] = "",
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Say what the payloads of a topic are, so that Spark shows their fields as columns.

    Protobuf descriptors are what protoc --include_imports --descriptor_set_out=FILE writes."""
    try:
        raw = file.read_bytes()
        definition = raw if type_ is SchemaType.PROTOBUF else raw.decode()
    except OSError as error:
        raise InvalidArgument(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{file} is not text: {error}") from error
    with opened(url, data) as broker:
        found = broker.set_topic_schema(name, type=type_.value, definition=definition, message=message)
    if as_json:
        print_json(_fields(found))
    else:
        print_done(f"payloads of {name} are {found.type.value} from now on")


@app.command(epilog="Example: sparrow topic schema show orders --json")
def show(name: Name, url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """Show the definition."""
    with opened(url, data) as broker:
        found = broker.topic_schema(name)
    if found is None:
        raise SchemaNotFound(f"the topic {name!r} has no schema")
    if as_json:
        print_json(_fields(found))
    elif isinstance(found.definition, str):
        typer.echo(found.definition)
    else:
        typer.echo(json.dumps(found.definition, indent=2, ensure_ascii=False))


@app.command(epilog="Example: sparrow topic schema delete orders --yes")
def delete(name: Name, yes: Yes = False, url: Url = None, data: Data = None, as_json: Json = False) -> None:
    """Take the schema of a topic away; its messages stay."""
    with opened(url, data) as broker:
        confirm(f"Delete the schema of {name}?", is_sure=yes, as_json=as_json)
        broker.delete_topic_schema(name)
    if as_json:
        print_json({"deleted": name})
    else:
        print_done(f"deleted the schema of {name}")


def _fields(schema: TopicSchema) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(schema)
    return found


reflow(app)
