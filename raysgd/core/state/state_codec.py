"""Encodes a training state to send it to another process with few copies of its tensors.

An encoded state consists of a skeleton and a buffer. The skeleton is a small pickle with a number in place of each
tensor. The buffer is one flat array with the bytes of all tensors and of large NumPy arrays. With `lend`, large tensors
that are contiguous in CPU memory are not copied into the buffer but are sent from their own memory. Pickle protocol 5
sends all of these arrays out of band. Ray therefore copies them into its object store once, and the receiver can use
the tensors there without another copy.

The encoding preserves types and order of containers, classes of other objects (through cloudpickle), the identity of
tensors, dtypes, strides of dense tensors, and `requires_grad`. It does not preserve the device (all tensors except meta
tensors arrive on the CPU), views of a part of another tensor's memory, attributes set on a tensor, or the wrapper
`DistributedDataParallel` of a model, because the wrapper belongs to a process group.

PyTorch is optional. In a process without PyTorch, a state has no tensors.

The host memory of copies is reused, because its pages are already mapped. The first access to a page costs several
times as much as copying into it. Huge pages do not help, because finding free huge pages can take longer than accessing
all the small pages for the first time.
"""

from __future__ import annotations

import io
import mmap
import pickle
import sys
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import finalize

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_MAX_BUFFERS = 2
"""Most buffers to retain: one holds the last copy while the next copy is written to the other."""


class HostBuffers:
    """Lends blocks of memory as arrays.

    A block can be reused once the last view of its array has been garbage collected.
    """

    def __init__(self) -> None:
        self._spare: list[_Memory] = []
        # Ids of blocks in use. Several threads may return blocks at the same time. This is safe, because removing an
        # entry from a set is atomic.
        self._lent: set[int] = set()

    def take_buffer(self, num_bytes: int, *, pinned: bool = False) -> Bytes:
        """Return an array of `num_bytes` uninitialized bytes.

        Args:
            num_bytes: Size of the array.
            pinned: True for pinned memory, into which a GPU can write directly.
        """
        fitting = (each for each in self._spare if each.num_bytes >= num_bytes and each.is_pinned == pinned)
        memory = next(fitting, None)
        if memory is None:
            self._spare.clear()  # these blocks do not fit, so free them before allocating
            memory = _Memory(num_bytes, pinned)
        else:
            self._spare.remove(memory)
        whole = memory.view()
        self._lent.add(id(memory))
        finalize(whole, self._give_back, memory).atexit = False
        content = whole[:num_bytes]
        assert content.base is whole, "every view, also of a view, must keep `whole` alive"
        return content

    def _give_back(self, memory: _Memory) -> None:
        """Keep a block for reuse, unless enough blocks are kept already.

        The thread that released the last view calls this method.
        """
        self._lent.discard(id(memory))
        if len(self._lent) + len(self._spare) < _MAX_BUFFERS:
            self._spare.append(memory)


class _Memory:
    """A block of ordinary or pinned memory."""

    def __init__(self, num_bytes: int, is_pinned: bool) -> None:
        self.num_bytes, self.is_pinned = num_bytes, is_pinned
        if is_pinned:
            import torch

            self._content: Any = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            self._content = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def view(self) -> Bytes:
        """Return a new NumPy array over the whole block."""
        return self._content.numpy() if self.is_pinned else np.frombuffer(self._content, dtype=np.uint8)


if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64
"""Alignment in bytes of each tensor in the buffer: the size of a cache line and of the widest vector register."""

_INLINE_ARRAY_BYTES = 4096
"""NumPy arrays up to this size stay in the skeleton: storing them separately would cost more than copying them."""

_LENT_BYTES = 2**16
"""`lend` does not copy contiguous CPU tensors of at least this size. It copies all other tensors into one array."""


@dataclass(frozen=True, eq=False)
class EncodedState:
    """A training state in a form that is ready to be sent.

    Pickling this object with protocol 5 and out-of-band buffers, as Ray does, copies no arrays.

    Attributes:
        skeleton: The pickled structure, with a number in place of each tensor.
        buffer: The bytes of the tensors and of large NumPy arrays, each aligned to a multiple of 64.
        apart: The bytes of tensors that are not in the buffer, one array per tensor.
    """

    skeleton: bytes
    buffer: Bytes
    apart: tuple[Bytes, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the state's tensors and large NumPy arrays in bytes, including padding."""
        return sum(int(content.nbytes) for content in (self.buffer, *self.apart))


class StateEncoder:
    """Encodes training states into host buffers. The buffers are reused, because their memory pages are already mapped.

    A buffer is reused only after all references to the encoded state, and to everything decoded from it with
    `copy=False`, are gone. At most two buffers are kept. An encoder must not be used from several threads at once; the
    encoded states may go to any thread.

    Examples:
        >>> import torch
        >>> encoder = StateEncoder()
        >>> encoded = encoder.encode({"weight": torch.ones(2), "epoch": 3})
        >>> decode(encoded, copy=True)
        {'weight': tensor([1., 1.]), 'epoch': 3}
    """

    def __init__(self) -> None:
        self._buffers = HostBuffers()

    def encode(self, state: Any) -> EncodedState:
        """Copy a training state into host memory. Later changes to its tensors do not affect the copy.

        Tensors on a GPU are copied directly into the buffer, after the work queued on the current stream.

        Raises:
            pickle.PicklingError: An object in the state cannot be pickled. Many classes raise a `TypeError` instead.
            ValueError: The state contains one worker's shard of a sharded tensor.
        """
        parts = _Parts()
        skeleton = _skeleton(state, parts)
        buffer = self._buffers.take_buffer(parts.num_bytes, pinned=parts.is_on_gpu)
        parts.copy_into(buffer)
        return EncodedState(skeleton, buffer)


def lend(state: Any) -> EncodedState:
    """Encode a training state without copying its large contiguous CPU tensors. The result must be sent immediately.

    If these tensors change before the result is sent, the changes are sent, too. All other data is copied.

    Raises:
        pickle.PicklingError: An object in the state cannot be pickled. Many classes raise a `TypeError` instead.
        ValueError: The state contains one worker's shard of a sharded tensor.
    """
    parts = _Parts(lends=True)
    skeleton = _skeleton(state, parts)
    buffer = np.empty(parts.num_bytes, dtype=np.uint8)
    parts.copy_into(buffer)
    return EncodedState(skeleton, buffer, tuple(parts.apart))


def decode(encoded: EncodedState, copy: bool) -> Any:
    """Rebuild a training state from its encoded form.

    Args:
        encoded: The result of `StateEncoder.encode` or `lend`, from this or another process.
        copy: If True, tensors and NumPy arrays own their memory. If False, tensors and large NumPy arrays are views of
            the encoded arrays and keep the encoded arrays alive. Do not write to such views, because memory from Ray's
            object store is shared with other processes. In both cases, each tensor has a separate storage of exactly
            its bytes.
    """
    tensor_parts, array_parts, structure = pickle.loads(encoded.skeleton)
    tensors = _build_tensors(tensor_parts, encoded, copy)
    arrays = [encoded.buffer[part].copy() if copy else encoded.buffer[part] for part in array_parts]
    return _SkeletonUnpickler(structure, arrays, tensors).load()


class _TensorPart(NamedTuple):
    """The position of a tensor's bytes in an `EncodedState`, and the tensor's dtype, shape and strides.

    The bytes are in the encoded state's `buffer`, or in one of the arrays in `apart`.
    """

    apart: int | None
    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    is_parameter: bool
    requires_grad: bool


class _Parts:
    """Collects the tensors and arrays of a state without duplicates, and assigns positions in the buffer to them.

    This object must not refer to the pickler. The reference cycle would keep the tensors alive until the next garbage
    collection.
    """

    def __init__(self, lends: bool = False) -> None:
        self.tensor_parts: list[_TensorPart] = []
        self.array_parts: list[slice] = []
        self.apart: list[Bytes] = []
        self.num_bytes = 0
        self._lends = lends
        self._tensors: list[torch.Tensor] = []
        self._arrays: list[memoryview] = []
        self._index_of: dict[Hashable, int] = {}

    @property
    def is_on_gpu(self) -> bool:
        """True if any tensor is on a CUDA device."""
        return any(tensor.is_cuda for tensor in self._tensors)

    def add_tensor(self, tensor: torch.Tensor) -> int:
        """Add a tensor and return its index. If the tensor was added before, return its existing index."""
        key = _identity(tensor)
        index = self._index_of.get(key)
        if index is None:
            index = self._index_of[key] = len(self._tensors)
            self._tensors.append(tensor)
            self.tensor_parts.append(self._tensor_part(tensor))
        return index

    def add_array(self, buffer: pickle.PickleBuffer) -> bool:
        """Add the memory of a large NumPy array. Return True if the array is small and should stay in the skeleton."""
        content = buffer.raw()
        if content.nbytes <= _INLINE_ARRAY_BYTES:
            return True
        self._arrays.append(content)
        start = self._reserve(content.nbytes)
        self.array_parts.append(slice(start, start + content.nbytes))
        return False

    def copy_into(self, memory: Bytes) -> None:
        """Copy the added tensors and arrays into a buffer.

        Tensors that are sent from their own memory are left out.
        """
        for content, array_part in zip(self._arrays, self.array_parts, strict=True):
            memory[array_part] = np.frombuffer(content, dtype=np.uint8)
        if not self._tensors:
            return
        import torch

        with torch.no_grad():
            for tensor, part in zip(self._tensors, self.tensor_parts, strict=True):
                if part.num_bytes and part.apart is None:
                    _copy_tensor(tensor, torch.from_numpy(_slice(memory, part)), part)
        for device in {tensor.device for tensor in self._tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def _tensor_part(self, tensor: torch.Tensor) -> _TensorPart:
        import torch

        num_bytes = tensor.numel() * tensor.element_size()
        lends = self._lends and num_bytes >= _LENT_BYTES and _is_plain_memory(tensor)
        if lends:
            self.apart.append(tensor.detach().reshape(-1).view(torch.uint8).numpy())
        return _TensorPart(
            apart=len(self.apart) - 1 if lends else None,
            start=0 if lends else self._reserve(num_bytes),
            num_bytes=num_bytes,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride(),
            is_parameter=isinstance(tensor, torch.nn.Parameter),
            requires_grad=tensor.requires_grad,
        )

    def _reserve(self, num_bytes: int) -> int:
        start = self.num_bytes
        self.num_bytes = start + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return start


def _skeleton(state: Any, parts: _Parts) -> bytes:
    """Pickle `state` without the contents of its tensors and large arrays, which are added to `parts`."""
    structure = io.BytesIO()
    _skeleton_pickler()(structure, parts).dump(state)
    return pickle.dumps((parts.tensor_parts, parts.array_parts, structure.getvalue()), protocol=5)


@cache
def _skeleton_pickler() -> Any:
    """Return the class that pickles skeletons.

    The class is created on first use, so that Ray is imported as late as possible.
    """
    from ray.cloudpickle import CloudPickler

    class SkeletonPickler(CloudPickler):
        """Pickles everything in a state except the contents of tensors and large arrays."""

        def __init__(self, stream: io.BytesIO, parts: _Parts) -> None:
            super().__init__(stream, protocol=5, buffer_callback=parts.add_array)
            self._parts = parts
            self._torch = _loaded_torch()

        def persistent_id(self, obj: Any) -> int | None:
            torch = self._torch
            return self._parts.add_tensor(obj) if torch is not None and _is_plain_tensor(obj, torch) else None

        def reducer_override(self, obj: Any) -> Any:
            """Pickle a `DistributedDataParallel` wrapper as its model, and tensors of special types as CPU tensors.

            Everything else is pickled as usual.
            """
            torch = self._torch
            if torch is not None and isinstance(obj, torch.nn.parallel.DistributedDataParallel):
                return _itself, (obj.module,)
            if torch is not None and isinstance(obj, torch.Tensor):
                return _reduced(obj)
            return super().reducer_override(obj)

    return SkeletonPickler


class _SkeletonUnpickler(pickle.Unpickler):
    """Unpickles the skeleton of a state, and inserts the state's tensors."""

    def __init__(self, structure: bytes, arrays: list[Bytes], tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(structure), buffers=arrays)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return self._tensors[pid]


def _loaded_torch() -> Any:
    """Return the `torch` module if this process has imported it, otherwise None.

    In a process without PyTorch, a state has no tensors.
    """
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "nn") else None


def _itself(value: Any) -> Any:
    return value


def _reduced(tensor: torch.Tensor) -> Any:
    """Return the value of `__reduce_ex__` for a tensor of a special type, after moving the tensor to the CPU.

    Meta tensors are not moved.

    Raises:
        ValueError: `tensor` is one worker's shard of a sharded tensor.
    """
    if hasattr(tensor, "full_tensor"):
        raise ValueError(
            "The state holds only this worker's shard of a model or optimizer. In a training function, save the result "
            "of `raysgd.train.torch.gather_state` instead. All workers have to call it."
        )
    return (tensor if tensor.device.type in ("cpu", "meta") else tensor.cpu()).__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _is_plain_tensor(value: Any, torch: Any) -> bool:
    """Return True for an ordinary dense tensor. Other tensors, such as sparse tensors, define their own pickling."""
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        return False
    return value.layout is torch.strided and not (value.is_quantized or value.is_meta or value.is_nested)


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's memory contains exactly its elements, in order, in host memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _identity(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for two references to the same tensor.

    Two tensors of the same type, dtype, shape and strides at the same address count as the same tensor, unless only one
    of them requires a gradient. An empty tensor has no address, so its key is the ID of the object.
    """
    if tensor.numel() == 0:
        return id(tensor)
    return (
        type(tensor),
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _copy_tensor(tensor: torch.Tensor, target: torch.Tensor, part: _TensorPart) -> None:
    """Copy a tensor's elements into a buffer. Copies from a GPU are only queued, and finish later.

    Args:
        tensor: The tensor.
        target: The bytes of the buffer at the tensor's position.
        part: The tensor's position, dtype, shape and strides.
    """
    import torch

    source = tensor.detach().resolve_conj().resolve_neg()
    if part.stride is None and source.is_contiguous():
        # View the elements as bytes, which is fast to copy and works for any dtype.
        source = source.reshape(-1).view(torch.uint8)
    else:
        target = _shaped(part, target)
    target.copy_(source, non_blocking=source.is_cuda)


def _build_tensors(parts: list[_TensorPart], encoded: EncodedState, copy: bool) -> list[torch.Tensor]:
    """Create the tensors of an encoded state from their bytes. Suppress PyTorch's warning about read-only arrays."""
    if not parts:
        return []
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        contents = [
            torch.from_numpy(_slice(encoded.buffer, part) if part.apart is None else encoded.apart[part.apart])
            for part in parts
        ]
    return [
        _build_tensor(part, content.clone() if copy else content) for part, content in zip(parts, contents, strict=True)
    ]


def _build_tensor(part: _TensorPart, content: torch.Tensor) -> torch.Tensor:
    """Create one tensor of an encoded state. Its storage is the array of bytes `content`."""
    import torch

    tensor = _shaped(part, content) if part.num_bytes else torch.empty(part.shape, dtype=part.dtype)
    if part.is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=part.requires_grad)
    return tensor.requires_grad_(part.requires_grad)


def _shaped(part: _TensorPart, content: torch.Tensor) -> torch.Tensor:
    """Return the flat bytes `content` as a tensor with the part's dtype, shape and strides."""
    elements = content.view(part.dtype)
    return elements.view(part.shape) if part.stride is None else elements.as_strided(part.shape, part.stride)


def _slice(content: Bytes, part: _TensorPart) -> Bytes:
    return content[part.start : part.start + part.num_bytes]
