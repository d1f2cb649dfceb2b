"""What a store does that does not keep what it was given."""

from __future__ import annotations

from raysgd.storage import Folder


def alter(folder: Folder, name: str, at: int) -> None:
    """Flips one bit of a file in a store; its size and its name stay. Again, and it is as it was."""
    path = f"{folder.path}/{name}"
    with folder.filesystem.open_input_stream(path, compression=None) as stream:
        content = bytearray(stream.read())
    content[at] ^= 1
    with folder.filesystem.open_output_stream(path, compression=None) as stream:
        stream.write(bytes(content))
