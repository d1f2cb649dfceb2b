"""Folders anywhere: on a disk, or in a store such as S3, Google Cloud Storage or Azure.

What a `Folder` promises, wherever it is:

* A file is whole or not there. A writer that is killed leaves the earlier file.
* What several processes `upload` into `folder.staged(name)` becomes `name` when one calls `folder.commit(name)`.
  `folder.committed()` lists only what was committed, so what a killed process left half-written is never mistaken for
  a result; `folder.discard_staged(prefix)` deletes it.
* Temporary failures of a store are tried again, with growing pauses. After 60 s, or `RAYSGD_STORAGE_TIMEOUT_S` seconds,
  a `StorageError` names the place and the cause.

A disk needs no package. A store needs the extra `storage`.

How a folder becomes whole in a store that cannot rename, and who writes what: ADR 68.
"""

from raysgd.exceptions import StorageError as StorageError
from raysgd.storage.folder import Folder as Folder
from raysgd.storage.opening import open_folder as open_folder

__all__ = ["Folder", "StorageError", "open_folder"]
