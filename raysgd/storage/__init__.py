"""Folders anywhere: on disk, or in a store such as S3, Google Cloud Storage or Azure.

A `Folder` promises, wherever it is:

* A file is complete or does not exist. If a writer is killed, the earlier file stays.
* What several processes `upload` into `folder.staged(name)` becomes `name` when one of them calls
  `folder.commit(name)`. `folder.committed()` lists only committed folders, so what a killed process left half-written
  is never mistaken for a result. `folder.discard_staged(prefix)` deletes it.
* Temporary failures of a store are retried, with growing pauses. After 60 s, or `RAYSGD_STORAGE_TIMEOUT_S` seconds, a
  `StorageError` names the place and the cause.

A disk needs no package. A store needs the extra `storage`.

ADR 68 explains how a folder is committed in a store that cannot rename, and which process writes what.
"""

from raysgd.exceptions import StorageError as StorageError
from raysgd.storage.folder import Folder as Folder
from raysgd.storage.opening import open_folder as open_folder

__all__ = ["Folder", "StorageError", "open_folder"]
