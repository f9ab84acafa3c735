"""The page pool: every page is in exactly one state whatever happens to it."""

from __future__ import annotations

import random

import pytest

from dflash_serve.cache.pages import DUMMY_PAGE, PagePool, page_key


class Walk:
    """A random life of a pool, beside a plain model of who holds what.

    Held sequences are prompts of whole pages over a tiny alphabet, so that prefixes collide often.
    """

    def __init__(self, seed: int, num_pages: int) -> None:
        self.random = random.Random(seed)
        self.pool = PagePool(num_pages)
        self.held: list[tuple[list[int], list[bytes]]] = []

    def keys(self, count: int) -> list[bytes]:
        key, found = b"root", []
        for _ in range(count):
            key = page_key(key, [self.random.randrange(2)])
            found.append(key)
        return found

    def take(self) -> None:
        keys = self.keys(self.random.randint(1, 5))
        hits = self.pool.match(keys)
        rest = self.pool.allocate(len(keys) - len(hits))
        if rest is None:
            self.pool.release(hits)
            return
        holders = {page for pages, _ in self.held for page in pages}
        assert DUMMY_PAGE not in rest
        assert not holders & set(rest), "a page in use was handed out again"
        assert len(set(rest)) == len(rest)
        self.held.append((hits + rest, keys))

    def offer(self) -> None:
        if self.held:
            pages, keys = self.random.choice(self.held)
            for page, key in zip(pages, keys[: self.random.randint(0, len(keys))], strict=False):
                self.pool.index(page, key)

    def drop(self) -> None:
        if self.held:
            pages, _ = self.held.pop(self.random.randrange(len(self.held)))
            self.pool.release(pages)

    def forget(self) -> None:
        self.pool.forget_contents()

    def step(self) -> None:
        act = self.random.choices(
            [self.take, self.offer, self.drop, self.forget], weights=[8, 8, 7, 0.2]
        )[0]
        act()
        self.pool.check()
        holders = {page for pages, _ in self.held for page in pages}
        assert self.pool.used == len(holders)
        assert self.pool.used + self.pool.available == self.pool.usable


@pytest.mark.parametrize("num_pages", [2, 5, 17, 60])
@pytest.mark.parametrize("seed", range(4))
def test_random_walk_keeps_every_page_in_one_state(seed: int, num_pages: int) -> None:
    walk = Walk(seed, num_pages)
    for _ in range(600):
        walk.step()
    while walk.held:
        walk.drop()
    walk.pool.check()
    assert walk.pool.used == 0
    assert walk.pool.available == num_pages - 1


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(4)
    assert pool.allocate(4) is None
    assert pool.available == 3
    assert pool.allocate(0) == []
    assert sorted(pool.allocate(3) or []) == [1, 2, 3]
    assert pool.allocate(1) is None


def test_match_stops_at_the_first_unknown_page() -> None:
    pool = PagePool(6)
    pages = pool.allocate(3) or []
    for page, key in zip(pages, [b"a", b"b", b"d"], strict=True):
        pool.index(page, key)
    assert pool.match([b"a", b"b", b"c", b"d"]) == pages[:2]
    assert pool.match([b"x", b"a"]) == []


def test_a_match_keeps_a_page_that_its_owner_gives_back() -> None:
    pool = PagePool(3)
    pages = pool.allocate(1) or []
    pool.index(pages[0], b"a")
    assert pool.match([b"a"]) == pages
    pool.release(pages)
    assert pool.used == 1
    pool.release(pages)
    assert (pool.used, pool.cached) == (0, 1)


def test_free_pages_are_taken_before_cached_ones() -> None:
    pool = PagePool(4)
    pages = pool.allocate(1) or []
    pool.index(pages[0], b"a")
    pool.release(pages)
    assert pages[0] not in (pool.allocate(2) or [])
    assert pool.match([b"a"]) == pages


def test_eviction_forgets_the_oldest_contents_first() -> None:
    pool = PagePool(3)
    for key in (b"old", b"new"):
        pages = pool.allocate(1) or []
        pool.index(pages[0], key)
        pool.release(pages)
    pool.allocate(1)
    assert pool.match([b"old"]) == []
    assert len(pool.match([b"new"])) == 1


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3) or []
    for page, key in zip(pages, [b"1", b"2", b"3"], strict=True):
        pool.index(page, key)
    pool.release(pages)
    pool.allocate(1)
    assert pool.match([b"1", b"2", b"3"]) == pages[:2]


def test_a_second_page_with_the_same_contents_is_not_indexed() -> None:
    pool = PagePool(4)
    first, second = pool.allocate(2) or []
    pool.index(first, b"a")
    pool.index(second, b"a")
    pool.release([second])
    assert pool.cached == 0
    assert pool.match([b"a"]) == [first]


def test_forgetting_contents_frees_cached_pages() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2) or []
    pool.index(pages[0], b"a")
    pool.release(pages)
    pool.forget_contents()
    pool.check()
    assert pool.cached == 0
    assert pool.match([b"a"]) == []
    assert pool.available == 3


def test_release_of_a_free_page_is_an_error() -> None:
    pool = PagePool(3)
    pages = pool.allocate(1) or []
    pool.release(pages)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pages)


def test_page_keys_depend_on_parent_tokens_and_order() -> None:
    keys = [
        page_key(b"", [1, 2, 3]),
        page_key(b"", [3, 2, 1]),
        page_key(b"", [1, 2]),
        page_key(b"", [1, 2, 3, 0]),
        page_key(b"x", [1, 2, 3]),
        page_key(page_key(b"", [1]), [2, 3]),
        page_key(b"", [2**40, 2, 3]),
    ]
    assert len(set(keys)) == len(keys)
    assert page_key(b"", [1, 2, 3]) == keys[0]
    assert {len(key) for key in keys} == {16}
