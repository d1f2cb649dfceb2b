"""How `tf.data` is divided: each sample once, in order, and the same global batches for any number of workers."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest

from raysgd.tf.objects import datasets
from tests.helpers.lazily import imported

tf = imported("tensorflow")


def numbers(total: int, batch_size: int, **options: Any) -> Any:
    return tf.data.Dataset.range(total).batch(batch_size, **options)


def contents(dataset: Any) -> list[list[int]]:
    return [batch.numpy().tolist() for batch in dataset]


def parts(dataset: Any, sharding: Any, num_workers: int) -> list[list[list[int]]]:
    batches = datasets.global_batches(dataset, sharding, num_workers)
    return [contents(datasets.part_of(batches, rank, num_workers)) for rank in range(num_workers)]


def test_a_global_batch_is_divided_in_order_and_evenly() -> None:
    assert parts(numbers(11, 4), "global", 2) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]
    assert parts(numbers(5, 5), "global", 3) == [[[0, 1]], [[2, 3]], [[4]]]


def test_batches_of_one_worker_are_joined_first() -> None:
    assert parts(numbers(11, 4), "worker", 2) == [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7], [10]]]


def test_a_worker_may_have_nothing_in_the_last_step() -> None:
    assert parts(numbers(5, 4), "global", 2) == [[[0, 1], [4]], [[2, 3], []]]


def test_the_batch_size_is_known_where_tensorflow_knows_it() -> None:
    assert datasets.batch_size_of(numbers(22, 4, drop_remainder=True)) == 4
    assert datasets.batch_size_of(numbers(22, 4)) is None
    assert datasets.batch_size_of(datasets.prepare_dataset_shard(numbers(22, 4, drop_remainder=True))) is None
    assert datasets.batch_size_of(None) is None


@pytest.mark.parametrize("sharding", ["global", "worker"])
@pytest.mark.parametrize("drop_remainder", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
def test_each_sample_is_used_once(sharding: Any, drop_remainder: bool, num_workers: int) -> None:
    dataset = numbers(22, 4, drop_remainder=drop_remainder)
    used = [sample for part in parts(dataset, sharding, num_workers) for batch in part for sample in batch]
    assert sorted(used) == list(range(20 if drop_remainder else 22))


@pytest.mark.parametrize("sharding", ["global", "worker"])
def test_sparse_tensors_are_refused_with_what_makes_them_dense(sharding: Any) -> None:
    pairs = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(np.eye(6)), np.arange(6))).batch(3)
    with pytest.raises(
        ValueError, match=r"yields SparseTensorSpec.* `dataset.map\(lambda x, y: \(tf.sparse.to_dense\(x"
    ):
        parts(pairs, sharding, 2)
    dense = pairs.map(lambda x, y: (tf.sparse.to_dense(x), y))
    assert [len(target) for _, target in datasets.part_of(dense, 1, 2)] == [1, 1]


def test_structures_are_kept() -> None:
    x = np.arange(6.0).reshape(6, 1)
    pairs = tf.data.Dataset.from_tensor_slices(({"a": x, "b": x * 2}, np.arange(6))).batch(3)
    for sharding in ("global", "worker"):
        batches = datasets.global_batches(pairs, sharding, 2)  # type: ignore[arg-type]
        inputs, target = next(iter(datasets.part_of(batches, 1, 2)))
        assert set(inputs) == {"a", "b"}
        assert inputs["b"].numpy().ravel().tolist() == [2.0 * number for number in target.numpy()]
    alone = tf.data.Dataset.from_tensor_slices((x,)).batch(2)
    assert isinstance(next(iter(datasets.part_of(alone, 0, 2))), tuple)


def test_ragged_batches_are_divided() -> None:
    rows = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6]])
    dataset = tf.data.Dataset.from_tensor_slices(rows).ragged_batch(4)
    assert next(iter(datasets.part_of(dataset, 1, 2))).to_list() == [[], [4, 5, 6]]


def test_counts_come_along_and_a_worker_without_samples_is_shown_one() -> None:
    found = [
        (batch.numpy().tolist(), int(own), int(total), weights.numpy().tolist())
        for batch, own, total, weights in datasets.counted_part_of(numbers(5, 4), 1, 2)
    ]
    assert found == [([2, 3], 2, 4, [0.0, 0.0]), ([4], 0, 1, [0.0, 0.0])]


def test_the_weights_of_the_samples_are_counted_too() -> None:
    weighted = tf.data.Dataset.from_tensor_slices((tf.range(3), tf.range(3), [1.0, 2.0, 4.0])).batch(3)
    [(_, _, _, weights)] = list(datasets.counted_part_of(weighted, 0, 2))
    assert weights.numpy().tolist() == [3.0, 7.0]


@pytest.mark.parametrize("consumed", [0, 3, 4, 6, 11])
def test_a_pass_goes_on_after_any_number_of_samples(consumed: int) -> None:
    rest = contents(datasets.after_samples(numbers(11, 4), consumed))
    assert [sample for batch in rest for sample in batch] == list(range(consumed, 11))
    assert all(rest)


def test_what_is_not_divided_is_cut_to_the_size_of_one_worker() -> None:
    assert contents(datasets.own_part_of(numbers(7, 4), 3)) == [[0, 1], [2], [3], [4], [5], [6]]


def test_the_policy_says_whether_to_divide() -> None:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    assert datasets.is_divided(numbers(4, 2))
    assert not datasets.is_divided(numbers(4, 2).with_options(options))


def test_what_ranks_compare_differs_when_the_data_does() -> None:
    same = datasets.signature_of(numbers(11, 4))
    assert same == datasets.signature_of(numbers(11, 4))
    assert same != datasets.signature_of(numbers(13, 4))
    assert same != datasets.signature_of(numbers(11, 4).map(lambda x: tf.cast(x, tf.float32)))


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (lambda: [1, 2], TypeError, r"`train` is a `list`: need a `tf\.data\.Dataset`"),
        (lambda: tf.data.Dataset.range(3), ValueError, r"not a batch: call `\.batch\(batch_size\)`"),
        (lambda: tf.data.Dataset.from_tensors((np.ones(4), np.ones(1))), ValueError, r"first dimension \[1, 4\]"),
    ],
)
def test_what_is_no_dataset_of_batches_is_refused(dataset: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        datasets.check_dataset("train", dataset())


class Indexed:
    """As a `PyDataset` of Keras, which TensorFlow may have in either version."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return np.full((2, 4), index, "float32"), np.full((2, 1), index, "float32")

    def on_epoch_end(self) -> None: ...


def test_data_of_keras_by_index_are_refused_with_a_line_that_makes_a_dataset_of_them() -> None:
    data = Indexed()
    with pytest.raises(TypeError, match="`train` is a `Indexed`") as refused:
        datasets.check_dataset("train", data)
    *_, call, _, _, signature = re.findall("`([^`]*)`", str(refused.value))
    made = eval(call.replace("...", signature), {"tf": tf, "data": data})
    datasets.check_dataset("train", made)
    assert [x.numpy()[0, 0] for x, _ in made] == [0, 1, 2]


def test_a_shuffle_is_found_anywhere_in_the_dataset() -> None:
    plain = numbers(8, 2)
    assert not datasets.is_shuffled(plain.map(lambda x: x).prefetch(1))
    assert datasets.is_shuffled(tf.data.Dataset.range(8).shuffle(8).batch(2).map(lambda x: x))
    assert datasets.is_shuffled(tf.data.Dataset.zip((plain, plain.shuffle(4))))


def order_of(dataset: Any) -> list[int]:
    return [int(number) for batch in dataset for number in batch]


@pytest.mark.parametrize("kind", ["range", "generator", "repeated"])
def test_a_copy_that_was_not_used_begins_with_the_order_of_the_first_pass(kind: str) -> None:
    tf.random.set_seed(1)  # as all workers do
    numbers = tf.data.Dataset.range(12)
    if kind == "generator":
        numbers = tf.data.Dataset.from_generator(
            lambda: iter(range(12)), output_signature=tf.TensorSpec([], tf.int64)
        ).map(lambda number: tf.numpy_function(lambda x: x + 1, [number], tf.int64))
    dataset = numbers.shuffle(12).batch(5)
    if kind == "repeated":
        dataset = numbers.cache().shuffle(12).repeat(2).batch(5).prefetch(1)
    orders = [order_of(dataset) for _ in range(3)]
    assert orders[0] != orders[1]
    copy = datasets.unused_copy(dataset)
    assert [order_of(copy) for _ in range(3)] == orders
    assert order_of(dataset) == order_of(copy), "the one that was copied goes on where it was"


def test_a_packed_dataset_comes_out_of_a_message_as_it_was() -> None:
    dataset = datasets.prepare_dataset_shard(tf.data.Dataset.from_tensor_slices((np.arange(5), np.eye(5))).batch(2))
    came = pickle.loads(pickle.dumps(datasets.packed("it", dataset))).make()
    assert came.element_spec == dataset.element_spec
    assert not datasets.is_divided(came)
    assert [x.numpy().tolist() for x, _ in came] == [[0, 1], [2, 3], [4]]


def test_a_dataset_that_calls_python_is_not_packed() -> None:
    generated = tf.data.Dataset.from_generator(lambda: iter(range(3)), output_signature=tf.TensorSpec([], tf.int64))
    with pytest.raises(ValueError, match=r"`it`: make this dataset in `data_creator`.* generator"):
        datasets.packed("it", generated.batch(2))


def test_what_fit_validates_on_becomes_a_dataset_of_batches() -> None:
    x, y = np.arange(5), np.eye(5)
    sizes = [[len(part) for part in batch] for batch in datasets.evaluation_dataset("it", (x, y, None), 2)]
    assert sizes == [[2, 2], [2, 2], [1, 1]]
    [(several, _)] = list(datasets.evaluation_dataset("it", ([x, y], y), 8))
    assert isinstance(several, tuple)
    with pytest.raises(TypeError, match=r"`it` is made of `generator`: need a `tf\.data\.Dataset`"):
        datasets.evaluation_dataset("it", (n for n in range(3)), 2)


def test_a_dataset_that_notes_its_passes_is_otherwise_the_same() -> None:
    dataset, noted = tf.data.Dataset.range(12).batch(5), []  # type: ignore[var-annotated]
    noting = datasets.noting_passes(dataset, 1, lambda: noted.append(1))
    iter(noting)
    assert not noted, "nobody has drawn from it"
    assert order_of(noting) == order_of(noting) == list(range(5, 12))
    assert len(noted) == 2
    assert int(noting.cardinality()) == 2
    assert noting.element_spec == dataset.element_spec


def test_a_batch_of_zeros_says_that_it_is_one() -> None:
    zeros = datasets.zeros_like(tf.data.Dataset.from_tensor_slices(np.ones((6, 2))).batch(3))
    assert [batch.numpy().tolist() for batch in zeros] == [[[0.0, 0.0]]]
    assert int(zeros.cardinality()) == 1, "else Keras warns of data that ran out"
