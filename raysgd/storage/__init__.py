"""Folders on disk, or in a store: remote object storage such as S3, Google Cloud Storage or Azure.

A `Folder` guarantees, wherever it is:

* Files are written atomically. If a writer is killed, the previous file remains.
* Several processes can `upload` files into `folder.staged(name)`. They become the folder `name` when one process calls
  `folder.commit(name)`. `folder.committed()` lists only committed folders, so the incomplete output of a killed process
  is never mistaken for a result. `folder.discard_staged(prefix)` deletes such output.
* Temporary failures of a store are retried with exponential backoff. After 60 s, or `RAYSGD_STORAGE_TIMEOUT_S` seconds,
  a `StorageError` reports the location and the cause.

Folders on disk need no package. Folders in a store need the extra `storage`.

ADR 68 explains how a folder is committed in a store that cannot rename, and which process writes which files.
"""

from raysgd.exceptions import StorageError as StorageError
from raysgd.storage.folder import Folder as Folder
from raysgd.storage.opening import open_folder as open_folder

__all__ = ["Folder", "StorageError", "open_folder"]
