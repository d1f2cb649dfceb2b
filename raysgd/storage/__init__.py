"""Folders on disk, or in a store: remote object storage such as S3, Google Cloud Storage or Azure.

A `Folder` gives these guarantees, both on disk and in a store:

* Files are written atomically. If the process that writes a file is killed, the previous file remains.
* Several processes can `upload` files into `folder.staged(name)`. When one process calls `folder.commit(name)`, these
  files become the folder `name`. `folder.committed()` lists only such committed folders, so the incomplete files of a
  killed process are never mistaken for a result. `folder.discard_staged(prefix)` deletes incomplete files.
* Operations that fail temporarily in a store are retried, with pauses that become longer. After 60 s, or
  `RAYSGD_STORAGE_TIMEOUT_S` seconds, a `StorageError` names the location and the cause.

Folders in a store need the extra `storage`. Folders on disk need it only for the property `filesystem`.

ADR 68 explains how a folder is committed in a store that cannot rename, and which process writes which files.
"""

from raysgd.exceptions import StorageError as StorageError
from raysgd.storage._store import open_folder as open_folder
from raysgd.storage.folder import Folder as Folder

__all__ = ["Folder", "StorageError", "open_folder"]
