"""What ranks say of themselves in a piece of work, and when the others hear it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raysgd.connections.mesh.words import RankStatements
from tests.connections.mesh.test_board import boards_of


@pytest.fixture
def ranks() -> Iterator[list[RankStatements]]:
    boards = boards_of(3)
    yield [RankStatements(rank, len(boards), board, board.interrupt) for rank, board in enumerate(boards)]
    for board in boards:
        board.close()


def test_all_hear_what_the_others_say_in_this_piece_of_work(ranks: list[RankStatements]) -> None:
    for number in range(2):
        for words in ranks:
            words.begin(lambda word: None)
        for words in ranks:
            words.say(b"%d of %d" % (words.rank, number))
        heard = [words.await_all(20) for words in ranks]
        assert heard == [{other: b"%d of %d" % (other, number) for other in range(3) if other != me} for me in range(3)]


def test_a_word_is_heard_as_it_comes_or_at_the_beginning_if_it_was_there_before(ranks: list[RankStatements]) -> None:
    heard: list[bytes] = []
    ranks[0].begin(lambda word: None)
    ranks[1].begin(heard.append)
    ranks[0].say(b"first")
    assert ranks[1].await_all(0.1) == {0: b"first"}
    ranks[2].begin(heard.append)
    ranks[2].say(b"second")
    assert ranks[1].await_all(20) == {0: b"first", 2: b"second"}
    ranks[1].say(b"its own")
    assert ranks[2].await_all(20) == {0: b"first", 1: b"its own"}
    assert sorted(heard) == [b"first", b"first", b"its own", b"second"]


def test_in_a_broken_group_no_rank_waits(ranks: list[RankStatements]) -> None:
    for words in ranks:
        words.begin(lambda word: None)
    ranks[2].say(b"the last")
    assert ranks[0].await_all(0.1) == {2: b"the last"}
    ranks[1].interrupt()
    assert ranks[0].await_all(1000) == {2: b"the last"}
    ranks[0].say(b"not heard")


def test_words_of_pieces_of_work_that_are_over_are_forgotten_and_no_message_says_so() -> None:
    boards = boards_of(2)
    ranks = [RankStatements(rank, 2, board, board.interrupt) for rank, board in enumerate(boards)]
    boards[0].put("a key of others", b"stays")
    for _ in range(3):
        for words in ranks:
            words.begin(lambda word: None)
        for words in ranks:
            words.say(b"done")
        for words in ranks:
            assert words.await_all(20)
    ranks[0].begin(lambda word: None)
    assert (len(boards[0]), len(boards[1])) == (1, 3), "the second rank has not begun yet"
    for board in boards:
        board.close()


def test_a_word_for_a_piece_of_work_that_this_rank_has_not_begun_is_kept_until_then() -> None:
    boards, heard = boards_of(2), list[bytes]()
    ranks = [RankStatements(rank, 2, board, board.interrupt) for rank, board in enumerate(boards)]
    ranks[1].begin(heard.append)
    ranks[1].say(b"early")
    boards[0].wait(["raysgd/words/1/1"], 20)
    ranks[0].begin(heard.append)
    assert heard == [b"early"]
    for board in boards:
        board.close()


def test_what_is_to_be_said_later_is_said_after_a_while_or_at_once_if_that_is_asked_for() -> None:
    boards = boards_of(2)
    ranks = [RankStatements(rank, 2, board, board.interrupt) for rank, board in enumerate(boards)]
    for words in ranks:
        words.begin(lambda word: None)
    ranks[0].say_later(lambda: b"over")
    assert ranks[1].await_all(0.1) == {}
    assert ranks[1].await_all(20) == {0: b"over"}
    ranks[1].say_later(lambda: b"over, too")
    ranks[1].say_last()
    assert ranks[0].await_all(20) == {1: b"over, too"}
    for board in boards:
        board.close()
