"""The public names and where they are defined: type checkers and `lazy_names` read this file."""

from raysgd.core.arrays.user_data import Arrays as Arrays
from raysgd.core.arrays.user_data import RayBatches as RayBatches
from raysgd.data.dataset import Dataset as Dataset
from raysgd.streams.formats import ArrowStream as ArrowStream
from raysgd.streams.formats import HuggingFaceStream as HuggingFaceStream
from raysgd.streams.formats import IterableStream as IterableStream
from raysgd.streams.formats import JSONLinesStream as JSONLinesStream
from raysgd.streams.formats import ParquetStream as ParquetStream
from raysgd.streams.formats import TarStream as TarStream
from raysgd.streams.stream import Shard as Shard
from raysgd.streams.stream import Stream as Stream
