"""Checkpoints in an S3-compatible store, beside the run's directory, under their digests.

An object is whole or absent, since S3 shows none before its upload is complete. The same digest is
the same content, so whoever puts it first or again does no harm. What is fetched is digested before
it has a name here. Requests are tried again within bounds; credentials come from the usual
variables (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``) or an instance's role,
are read by the library alone, and stand in no message.

The library is obstore: one wheel without dependencies of its own, kept by the makers of its Rust
core's users. boto3 brings 33 MB and blocks per request, aiobotocore pins boto's versions.
"""

import datetime as dt
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from stoker.errors import ArtifactDamaged, ArtifactNotStored, BoxFailed, ConfigInvalid
from stoker.seams.entropy import fresh_id
from stoker.seams.faultpoints import declare, reach

FETCHED = declare("checkpoint.fetched", "a checkpoint from the remote store has no name here yet")

_RETRIES_MAX = 4
_TRIED_SECONDS = 20.0
"""How long one request is tried again."""
_REQUEST_SECONDS = 60
"""Of one request, its whole body included."""
_PIECE_BYTES = 16 * 1024 * 1024
"""What one request fetches: a slow line must bear it within that time."""


class RemoteStore:
    """One place in a bucket. All calls block."""

    def __init__(self, url: str, *, endpoint: str | None = None) -> None:
        """``url``: ``s3://BUCKET/PREFIX``; ``endpoint``: of a server that is not Amazon's.

        Raises:
            ConfigInvalid: it cannot be used, or the library is not installed.
        """
        try:
            import obstore  # noqa: PLC0415 - an extra
            from obstore.store import S3Store  # noqa: PLC0415 - the same
        except ImportError as error:
            raise ConfigInvalid(
                f"storage.url is {url!r}, which needs obstore: pip install 'stoker[s3]'"
            ) from error
        self._url = url
        self._obstore: Any = obstore
        elsewhere: Any = {"endpoint": endpoint} if endpoint else {}
        try:
            self._store = S3Store.from_url(
                url,
                **elsewhere,
                client_options={
                    # Only where it is said: a store on this machine or in a private network.
                    "allow_http": bool(endpoint and endpoint.startswith("http://")),
                    "timeout": dt.timedelta(seconds=_REQUEST_SECONDS),
                },
                retry_config={
                    "max_retries": _RETRIES_MAX,
                    "retry_timeout": dt.timedelta(seconds=_TRIED_SECONDS),
                },
            )
        except obstore.exceptions.BaseError as error:
            raise ConfigInvalid(f"storage.url is {url!r}, which is no place in a store") from error

    def put(self, file: Path, digest: str) -> None:
        """Keep ``file`` under its digest; nothing is sent where it is already.

        Raises:
            ArtifactNotStored: the store cannot be reached or refuses; nothing has appeared there.
        **Durability:** the store has said that it has it when this returns.
        """
        try:
            if not self._holds(digest, file.stat().st_size):
                self._obstore.put(self._store, digest, file)
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise ArtifactNotStored(
                f"checkpoint {digest} could not be put into {self._url} ({type(error).__name__}); "
                "it does not count; look at the store and its credentials",
                digest=digest,
            ) from None  # the library's words may hold parts of a signed request

    def _holds(self, digest: str, size_bytes: int) -> bool:
        try:
            return bool(self._obstore.head(self._store, digest)["size"] == size_bytes)
        except (FileNotFoundError, self._obstore.exceptions.NotFoundError):
            return False

    def _pieces(self, digest: str) -> Iterator[bytes]:
        size = self._obstore.head(self._store, digest)["size"]
        for start in range(0, size, _PIECE_BYTES):
            end = min(start + _PIECE_BYTES, size)
            yield self._obstore.get_range(self._store, digest, start=start, end=end)

    def fetch(self, digest: str, drafts: Path) -> Path:
        """Return a file in ``drafts`` that holds ``digest``.

        Raises:
            ArtifactDamaged: it is not there, or is something else; nothing is left here.
            BoxFailed: the store cannot be reached, or the disk is full; nothing is left here.
        """
        draft = drafts / f".{fresh_id('new_')}"
        found = blake2b(digest_size=32)
        try:
            with draft.open("xb") as into:
                for piece in self._pieces(digest):
                    found.update(piece)
                    into.write(piece)
            if found.hexdigest() != digest:
                raise ArtifactDamaged(
                    f"{self._url} holds something else under {digest}; it was not used",
                    digest=digest,
                )
            reach(FETCHED)
            return draft.replace(drafts / digest)
        except (FileNotFoundError, self._obstore.exceptions.NotFoundError):
            raise ArtifactDamaged(
                f"checkpoint {digest} is neither here nor in {self._url}; nothing was made",
                digest=digest,
            ) from None
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise BoxFailed(
                f"checkpoint {digest} could not be fetched from {self._url} "
                f"({type(error).__name__}); nothing was made"
            ) from None
        finally:
            draft.unlink(missing_ok=True)
