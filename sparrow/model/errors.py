"""The one registry of errors, shared by every surface.

Three kinds of failure exist. A bug is an assertion. A fault of the world (a full disk, a lost
connection) is reported by the shell that met it. A refused request is one of the classes below,
raised before anything has changed.

Every class has a stable ``code``, the HTTP status that carries it, and a hint: what to do next.
A class is looked up by its code when an error arrives over a wire, so both ends raise the same type.
"""

from __future__ import annotations

from sparrow.model.refusal import SparrowError as SparrowError
from sparrow.model.refusal import from_dict as from_dict
from sparrow.model.refusal import registry as registry

# Requests that are wrong in themselves.


class InvalidArgument(SparrowError, ValueError):
    """A value has the wrong type or is out of range."""

    code = "INVALID_ARGUMENT"
    status = 400
    default_hint = "Correct the named value and call again; nothing was changed."


class InvalidName(InvalidArgument):
    """A topic or subscription name breaks the naming rules."""

    code = "INVALID_NAME"
    default_hint = "Use 1 to 255 characters of A-Z a-z 0-9 . _ ~ % + - with no empty level, as in orders.us."


class InvalidPattern(InvalidArgument):
    """A subscription pattern breaks the wildcard rules."""

    code = "INVALID_PATTERN"
    default_hint = "Use * for exactly one level and # for the rest, at the end only: orders.*.paid"


class InvalidFilter(InvalidArgument):
    """A filter expression does not parse or has the wrong types; ``position`` says where."""

    code = "INVALID_FILTER"
    default_hint = 'A filter looks like: attributes.env = "prod" AND NOT hasAttribute("test")'


class InvalidSettings(InvalidArgument):
    """The configuration has errors; all of them are listed."""

    code = "INVALID_SETTINGS"
    default_hint = "Correct every line listed; `sparrow up --help` shows the settings."


class InvalidOption(InvalidArgument):
    """An option of the Spark source or sink is unknown, missing or wrong; ``option`` names it."""

    code = "INVALID_OPTION"
    default_hint = "Correct the option named here; docs/guides/spark.md lists them all."


class InvalidPipeline(InvalidArgument):
    """A pipeline is declared wrong; the message begins with the key."""

    code = "INVALID_PIPELINE"
    default_hint = "Correct the key named here; docs/guides/pipelines.md shows them all."


class InvalidSchema(InvalidArgument):
    """The schema of a topic is wrong; the message begins with the place."""

    code = "INVALID_SCHEMA"
    default_hint = "Correct the place named here; docs/guides/spark.md shows schemas."


class EndpointRefused(InvalidArgument):
    """A webhook may not be sent to this URL or to the address that it leads to."""

    code = "ENDPOINT_REFUSED"
    status = 422
    default_hint = "Use a public https address, or let the operator allow it in the settings push.*."


class MessageTooLarge(InvalidArgument):
    """A message or a batch is over its limit."""

    code = "MESSAGE_TOO_LARGE"
    status = 413
    default_hint = "Split the batch, or store the payload elsewhere and publish a reference to it."


class UnsupportedContentType(InvalidArgument):
    """The body of a request is of a kind that the operation does not take."""

    code = "UNSUPPORTED_CONTENT_TYPE"
    status = 415
    default_hint = "Send the body as JSON, with Content-Type: application/json."


class MethodNotAllowed(InvalidArgument):
    """What is there cannot be used in this way."""

    code = "METHOD_NOT_ALLOWED"
    status = 405
    default_hint = "Use one of the methods that the Allow header names."


class RequestTimeout(InvalidArgument):
    """The request took too long to arrive."""

    code = "REQUEST_TIMEOUT"
    status = 408
    default_hint = "Send the whole request without long pauses; nothing was changed."


class HeadersTooLarge(InvalidArgument):
    """The head of a request is over its limit."""

    code = "HEADERS_TOO_LARGE"
    status = 431
    default_hint = "Send fewer or shorter headers, or put the values into the body."


# Things that are not there, or are there already.


class NotFound(SparrowError, LookupError):
    """Something named does not exist."""

    code = "NOT_FOUND"
    status = 404
    default_hint = "Check the name."


class TopicNotFound(NotFound):
    """The topic does not exist."""

    code = "TOPIC_NOT_FOUND"
    default_hint = "Create it with create_topic, or turn on auto_create_topics."


class SubscriptionNotFound(NotFound):
    """The subscription does not exist."""

    code = "SUBSCRIPTION_NOT_FOUND"
    default_hint = "Create it with subscribe."


class MessageNotFound(NotFound):
    """No message has this id."""

    code = "MESSAGE_NOT_FOUND"
    default_hint = "Retention may have removed it; message ids look like 12-0-4711."


class SnapshotNotFound(NotFound):
    """The snapshot does not exist or has expired."""

    code = "SNAPSHOT_NOT_FOUND"
    default_hint = "List the snapshots; they expire after their time to live."


class ReplayNotFound(NotFound):
    """No replay job has this id."""

    code = "REPLAY_NOT_FOUND"
    default_hint = "List the replays of the subscription."


class PipelineNotFound(NotFound):
    """There is no pipeline of that name."""

    code = "PIPELINE_NOT_FOUND"
    default_hint = "Apply its declaration; `sparrow pipeline list` shows those that exist."


class SchemaNotFound(NotFound):
    """The topic has no schema."""

    code = "SCHEMA_NOT_FOUND"
    default_hint = "Give it one; `sparrow topic schema set` does."


class TokenNotFound(NotFound):
    """No token has this id or name."""

    code = "TOKEN_NOT_FOUND"
    default_hint = "List the tokens; one is named by its id or its name, never by its secret."


class MemberNotFound(NotFound):
    """The group has no such member: it never joined, left, or was taken for dead."""

    code = "MEMBER_NOT_FOUND"
    default_hint = "Join the group again; what the member held is delivered to others."


class StageNotFound(NotFound):
    """No part of this name is staged: it was committed, aborted, swept, or never written."""

    code = "STAGE_NOT_FOUND"
    default_hint = "Stage the part again under a new name, then commit; stages are kept for staging.keep_s."


class AlreadyExists(SparrowError):
    """Something of this name exists, with other settings."""

    code = "ALREADY_EXISTS"
    status = 409
    default_hint = "Pick another name, or update the one that exists."


class TopicExists(AlreadyExists):
    """A topic of this name exists."""

    code = "TOPIC_EXISTS"
    default_hint = "Pick another name, or use update_topic to change the one that exists."


class SubscriptionExists(AlreadyExists):
    """A subscription of this name exists with other settings."""

    code = "SUBSCRIPTION_EXISTS"
    default_hint = "Pick another name, or update the subscription that exists."


class TokenExists(AlreadyExists):
    """A token of this name exists."""

    code = "TOKEN_EXISTS"
    default_hint = "Pick another name, or revoke the token that exists."


class PipelineHeld(SparrowError):
    """Another runner has the pipeline."""

    code = "PIPELINE_HELD"
    status = 409
    default_hint = "Stop the pipeline, or the runner named here, and try again."


class TopicInUse(SparrowError):
    """The topic has subscriptions or serves as a dead-letter topic."""

    code = "TOPIC_IN_USE"
    status = 409
    default_hint = "Remove what uses it first, or pass force=True."


class PreconditionFailed(SparrowError):
    """The request does not fit the present state."""

    code = "FAILED_PRECONDITION"
    status = 409
    default_hint = "Read the present state and decide again."


class SegmentsChanged(PreconditionFailed):
    """Segments that a job wanted to replace are not in force any more."""

    code = "SEGMENTS_CHANGED"
    default_hint = "Nothing was changed. Retention or another job was faster: run the job again."


class DraftRefused(PreconditionFailed):
    """What a job wrote does not hold what the segments hold that it should replace."""

    code = "DRAFT_REFUSED"
    default_hint = "Nothing was changed, the segments stay in force. This is a fault of the job: report it."


class OffsetOutOfRange(SparrowError):
    """The offset is below what retention kept or beyond the end of the log."""

    code = "OFFSET_OUT_OF_RANGE"
    status = 416
    default_hint = "Seek to 'earliest' or 'latest', or to an offset between the two named here."


class DataLost(SparrowError):
    """Messages that a reader has not read yet are gone: retention was faster, or their topic is."""

    code = "DATA_LOST"
    status = 410
    default_hint = (
        "Keep messages for longer, or let the query go on without them: option failOnDataLoss=false."
    )


class TopicRecreated(DataLost):
    """The topic was deleted and made anew since the reader's position was saved."""

    code = "TOPIC_RECREATED"
    default_hint = (
        "Start the query with a new checkpoint, or at the new topic's beginning: failOnDataLoss=false."
    )


# Leases and settling.


class InvalidAckId(InvalidArgument):
    """An ack id is not one that this broker made."""

    code = "INVALID_ACK_ID"
    default_hint = "Pass the ack_id of a message as it was received."


class StaleAckId(SparrowError):
    """The lease behind an ack id has ended: expired, settled, or handed to another consumer."""

    code = "STALE_ACK_ID"
    status = 409
    default_hint = "Drop the message; it will be, or was, delivered again. Extend leases in time."


class StaleGeneration(SparrowError):
    """The group has moved on: the stream has another owner, or another process has the member's name."""

    code = "STALE_GENERATION"
    status = 409
    default_hint = "Drop what you hold of it and join the group again for the present assignment."


# Publishers.


class ProducerFenced(SparrowError):
    """A newer producer of the same name has taken over."""

    code = "PRODUCER_FENCED"
    status = 409
    default_hint = "Another process opened this producer name; stop this one or open it again."


class SequenceGap(SparrowError):
    """A producer's sequence jumped ahead of the next expected one."""

    code = "SEQUENCE_GAP"
    status = 409
    default_hint = "Send the missing sequence first; the error names the expected one."


class SequenceTooOld(SparrowError):
    """The repeated sequence was stored so long ago that its receipt is no longer held."""

    code = "SEQUENCE_TOO_OLD"
    status = 409
    default_hint = "The message is stored; only its receipt is forgotten. Do not send it again."


class StageIncomplete(SparrowError):
    """A part does not hold what its writer staged: a call is missing, or was lost with the power."""

    code = "STAGE_INCOMPLETE"
    status = 409
    default_hint = "Abort the part and stage it again under a new name; nothing of it was published."


# Limits.


class ResourceExhausted(SparrowError):
    """A limit is reached; the request may pass later."""

    code = "RESOURCE_EXHAUSTED"
    status = 429
    retryable = True
    default_hint = "Wait and try again, or raise the limit named here."


class DedupeWindowFull(ResourceExhausted):
    """The topic's idempotency window holds as many keys as it may."""

    code = "DEDUPE_WINDOW_FULL"
    default_hint = "Shorten dedupe_window_s of the topic or raise dedupe_keys_max."


class Backlogged(ResourceExhausted):
    """Too much waits to be written."""

    code = "BACKLOGGED"
    default_hint = "The disk is slower than the publishers: publish less at once and try again."


class StagingFull(ResourceExhausted):
    """As much is staged as may be."""

    code = "STAGING_FULL"
    default_hint = "Commit or abort what is staged, or raise staging.bytes_max."


class PublishRejected(ResourceExhausted):
    """The consumers of the topic are too far behind; ``retry_after_s`` says when to come again."""

    code = "PUBLISH_REJECTED"
    default_hint = "Wait for retry_after_s and publish again, or let the subscriptions catch up."


class RateLimited(ResourceExhausted):
    """A quota of the topic, the publisher or the token is used up; ``retry_after_s`` says until when."""

    code = "RATE_LIMITED"
    default_hint = "Wait for retry_after_s and try again, or raise the rate named here."


class LoadShed(ResourceExhausted):
    """Memory or disk run short, and what matters least is refused until ``retry_after_s`` has passed."""

    code = "LOAD_SHED"
    status = 503
    default_hint = "Wait for retry_after_s and try again; `GET /api/v1/health` says what runs short."


class InMaintenance(ResourceExhausted):
    """An operator has the broker in maintenance: it delivers, and takes no messages."""

    code = "IN_MAINTENANCE"
    status = 503
    default_hint = "Wait for retry_after_s and try again, or end the maintenance."


# Storage.


class StorageError(SparrowError):
    """The store cannot do what was asked."""

    code = "STORAGE_ERROR"
    status = 503


class JournalFrozen(StorageError):
    """A write or a sync failed; nothing more is accepted until the broker is opened again."""

    code = "JOURNAL_FROZEN"
    default_hint = "Check the disk, then restart the broker: recovery keeps every receipted message."


class StorageFull(StorageError):
    """The disk is full; nothing was written."""

    code = "STORAGE_FULL"
    status = 507
    retryable = True
    default_hint = "Free disk space or shorten retention; publishing resumes by itself."


class DataDamaged(StorageError):
    """Stored bytes do not match their checksum."""

    code = "DATA_DAMAGED"
    default_hint = "Run `sparrow log verify` on the data directory; it names the file and the offsets."


class CatalogDamaged(DataDamaged):
    """The catalog does not match its own digest, or is older than the journal says."""

    code = "CATALOG_DAMAGED"
    default_hint = "Stop the broker and run `sparrow log rebuild` on the data directory."


class DataDirectoryLocked(StorageError):
    """Another process holds the data directory open."""

    code = "DATA_DIRECTORY_LOCKED"
    status = 409
    default_hint = "Stop the other process, or connect to it instead of opening its directory."


class DataDirectoryNewer(StorageError):
    """The data directory was written by a newer version."""

    code = "DATA_DIRECTORY_NEWER"
    status = 409
    default_hint = "Use the newer version of Sparrow; this one has changed nothing."


class DataDirectoryUnusable(StorageError):
    """The data directory cannot be created, read or written."""

    code = "DATA_DIRECTORY_UNUSABLE"
    default_hint = "Give a directory that this user may create and write."


class NotADataDirectory(StorageError):
    """The path holds something else than a data directory."""

    code = "NOT_A_DATA_DIRECTORY"
    status = 404
    default_hint = "Give the directory that `sparrow up --data` was started with."


class AddressUnavailable(SparrowError):
    """A listener cannot have its address: taken, not allowed, or not of this machine."""

    code = "ADDRESS_UNAVAILABLE"
    status = 503
    default_hint = "Stop what listens there, or give another address; port 0 picks a free one."


class BrokerClosed(SparrowError):
    """The broker has been closed."""

    code = "BROKER_CLOSED"
    status = 503
    default_hint = "Open it again."


# Between a client and a broker.


class ProtocolError(SparrowError):
    """The other end of a connection does not speak the protocol."""

    code = "PROTOCOL_ERROR"
    status = 400
    default_hint = "See docs/protocol.md; the connection was closed."


class VersionUnsupported(ProtocolError):
    """No version of the protocol is spoken by both ends."""

    code = "VERSION_UNSUPPORTED"
    default_hint = "Use a client and a broker of neighbouring releases."


class Unauthenticated(SparrowError):
    """The broker wants a token, and was given none or another one."""

    code = "UNAUTHENTICATED"
    status = 401
    default_hint = "Give one: sparrow.connect(url, token=...), or the header Authorization: Bearer <token>."


class PermissionDenied(SparrowError):
    """The token is known, and does not allow this."""

    code = "PERMISSION_DENIED"
    status = 403
    default_hint = "Ask for a token with the scope named here: `sparrow token create` makes one."


class WebhookNotVerified(SparrowError):
    """A request is not a webhook signed with a known secret, or it is too old."""

    code = "WEBHOOK_NOT_VERIFIED"
    status = 401
    default_hint = "Answer 401 and do nothing else; check the secret and the clock if it should have passed."


class TooManyConnections(ResourceExhausted):
    """The broker serves as many connections as it may."""

    code = "TOO_MANY_CONNECTIONS"
    default_hint = "Close connections that are not needed, or raise server.connections_max."


class ConnectionLost(SparrowError):
    """The connection broke, or could not be made, before the answer came."""

    code = "CONNECTION_LOST"
    status = 503
    retryable = True
    default_hint = "Whether the request was carried out is not known; ask again when the broker is back."
