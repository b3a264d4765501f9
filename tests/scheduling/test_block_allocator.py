"""Blocks of the KV cache: who holds them, in which order they go, and how they are found again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ostinato.errors import ConfigError, OstinatoError, OutOfBlocksError, SchedulingError
from ostinato.scheduling.block_allocator import BlockAllocator, block_hashes, root_hash


def name(text: str) -> bytes:
    return text.encode()


def publish_all(allocator: BlockAllocator, blocks: list[int], names: str) -> None:
    for block, letter in zip(blocks, names, strict=True):
        allocator.publish(block, name(letter))


def test_block_0_is_counted_but_never_handed_out() -> None:
    allocator = BlockAllocator(5, 16)
    assert allocator.num_free_blocks == 4
    assert sorted(allocator.allocate(4)) == [1, 2, 3, 4]
    assert allocator.num_free_blocks == 0


def test_too_large_a_request_takes_nothing() -> None:
    allocator = BlockAllocator(5, 16)
    allocator.allocate(1)
    with pytest.raises(OutOfBlocksError, match=r"4 KV cache blocks .* only 3 of 4 are free"):
        allocator.allocate(4)
    assert issubclass(OutOfBlocksError, OstinatoError)
    assert issubclass(OutOfBlocksError, RuntimeError)
    assert len(allocator.allocate(3)) == 3


@pytest.mark.parametrize("counts", [[1] * 6, [6], [1, 5], [2, 4], [3, 0, 3]])
def test_free_blocks_go_before_idle_ones_and_tails_before_heads(counts: list[int]) -> None:
    allocator = BlockAllocator(7, 16)
    first = allocator.allocate(3)
    second = allocator.allocate(2)
    publish_all(allocator, first, "abc")
    publish_all(allocator, second, "de")
    allocator.release(second)
    allocator.release(first)
    # One block was never used; then the longest idle, last block of its sequence first.
    order = [block for count in counts for block in allocator.allocate(count)]
    assert order == [6, second[1], second[0], first[2], first[1], first[0]]
    allocator.release(order)
    assert allocator.num_free_blocks == 6


def test_the_lowest_free_blocks_go_first() -> None:
    allocator = BlockAllocator(8, 16)
    assert [allocator.allocate(count) for count in (2, 0, 1, 4)] == [[1, 2], [], [3], [4, 5, 6, 7]]


def test_taking_an_idle_block_protects_it_and_renews_it() -> None:
    allocator = BlockAllocator(4, 16)
    blocks = allocator.allocate(3)
    publish_all(allocator, blocks, "abc")
    allocator.release(blocks)
    found = allocator.match_prefix([name("a"), name("b"), name("x"), name("c")])
    assert found == blocks[:2]
    assert allocator.num_free_blocks == 3, "a match takes nothing"
    allocator.take(found)
    assert allocator.num_free_blocks == 1
    with pytest.raises(OutOfBlocksError):
        allocator.allocate(2)
    allocator.release(found)
    assert allocator.allocate(1) == [blocks[2]]


def test_an_evicted_block_is_not_found_again() -> None:
    allocator = BlockAllocator(2, 16)
    [block] = allocator.allocate(1)
    allocator.publish(block, name("a"))
    allocator.release([block])
    assert allocator.match_prefix([name("a")]) == [block]
    assert allocator.allocate(1) == [block]
    assert allocator.match_prefix([name("a")]) == []
    allocator.publish(block, name("b"))
    assert allocator.match_prefix([name("b")]) == [block]


def test_references_are_counted() -> None:
    allocator = BlockAllocator(2, 16)
    [block] = allocator.allocate(1)
    allocator.take([block])
    allocator.release([block])
    assert allocator.num_free_blocks == 0
    allocator.release([block])
    assert allocator.num_free_blocks == 1


def test_the_first_block_of_a_name_keeps_it() -> None:
    allocator = BlockAllocator(4, 16)
    first, second = allocator.allocate(2)
    allocator.publish(first, name("a"))
    allocator.publish(second, name("a"))
    allocator.publish(first, name("a"))
    assert allocator.match_prefix([name("a")]) == [first]
    allocator.release([second])
    assert allocator.allocate(1) == [second], "a block without a name is free, not idle"
    allocator.publish(second, name("b"))
    assert allocator.match_prefix([name("b")]) == [second]


def test_without_prefix_reuse_nothing_is_found() -> None:
    allocator = BlockAllocator(4, 16, enable_prefix_caching=False)
    [block] = allocator.allocate(1)
    allocator.publish(block, name("a"))
    assert allocator.match_prefix([name("a")]) == []


def test_reset_forgets_names_of_held_and_idle_blocks() -> None:
    allocator = BlockAllocator(4, 16)
    blocks = allocator.allocate(3)
    publish_all(allocator, blocks, "abc")
    allocator.release(blocks[1:])
    allocator.reset_prefix_cache()
    assert all(not allocator.match_prefix([name(letter)]) for letter in "abc")
    assert allocator.num_free_blocks == 2
    allocator.release(blocks[:1])
    assert sorted(allocator.allocate(3)) == [1, 2, 3]


def test_release_all_keeps_names_and_their_order() -> None:
    allocator = BlockAllocator(6, 16)
    idle, held = allocator.allocate(1), allocator.allocate(3)
    publish_all(allocator, held[:2], "ab")
    publish_all(allocator, idle, "c")
    allocator.release(idle)
    allocator.release_all()
    assert allocator.num_free_blocks == 5
    assert allocator.match_prefix([name("a"), name("b")]) == held[:2]
    order = [allocator.allocate(1)[0] for _ in range(5)]
    assert sorted(order[:2]) == [held[2], 5]
    assert order[2:] == [idle[0], held[1], held[0]]


def misuse(call: Callable[[BlockAllocator, list[int]], object]) -> str:
    """The message of the error that ``call`` raises; it must not have changed anything."""
    allocator = BlockAllocator(4, 16)
    blocks = allocator.allocate(2)
    allocator.publish(blocks[0], name("a"))
    with pytest.raises(SchedulingError) as raised:
        call(allocator, blocks)
    assert allocator.num_free_blocks == 1
    assert allocator.match_prefix([name("a")]) == blocks[:1]
    allocator.release(blocks)
    assert allocator.num_free_blocks == 3, "each had one reference"
    return str(raised.value)


def test_misuse_raises_and_changes_nothing() -> None:
    assert "block 3 has no references" in misuse(lambda a, held: a.release([*held, 3]))
    assert "occurs twice" in misuse(lambda a, held: a.release([*held, held[0]]))
    assert "block 4 does not exist" in misuse(lambda a, held: a.release([*held, 4]))
    assert "block 0 does not exist" in misuse(lambda a, held: a.take([*held, 0]))
    assert "block -1 does not exist" in misuse(lambda a, held: a.release([-1]))
    assert "block 3 is free" in misuse(lambda a, held: a.take([*held, 3]))
    assert "block 3 has no references" in misuse(lambda a, _: a.publish(3, name("b")))
    assert "already has another hash" in misuse(lambda a, held: a.publish(held[0], name("b")))


def test_freeing_twice_raises() -> None:
    allocator = BlockAllocator(4, 16)
    blocks = allocator.allocate(2)
    allocator.release(blocks)
    with pytest.raises(SchedulingError, match=r"block \d+ has no references"):
        allocator.release(blocks)
    assert allocator.num_free_blocks == 3


@pytest.mark.parametrize("value", [1, 0, -1, 2.0, True])
def test_num_blocks_is_checked(value: object) -> None:
    with pytest.raises(ConfigError, match=f"num_blocks .* got {value!r}"):
        BlockAllocator(value, 16)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, 16.0, True])
def test_block_size_is_checked(value: object) -> None:
    with pytest.raises(ConfigError, match=f"block_size .* got {value!r}"):
        BlockAllocator(8, value)  # type: ignore[arg-type]


def test_hashes_cover_everything_before_the_block() -> None:
    def last(tokens: list[int], size: int = 2, salt: bytes = b"") -> bytes:
        return list(block_hashes(root_hash(salt), tokens, size))[-1]

    chain = last([1, 2, 3, 4])
    assert chain == last([1, 2, 3, 4])
    different = [
        last([2, 1, 3, 4]),
        last([1, 2, 4, 3]),
        last([1, 2, 3, 4], salt=b"adapter"),
        last([1, 2, 3, 4], size=4),
        last([3, 4]),
        last([1 + (2 << 32), 3]),
    ]
    assert len({chain, *different}) == 1 + len(different)
    assert len(chain) == 16
    assert root_hash() == root_hash(b"")


def test_a_chain_goes_on_from_any_block() -> None:
    tokens = list(range(100, 124))
    whole = list(block_hashes(root_hash(), tokens, 4))
    assert whole[2:] == list(block_hashes(whole[1], tokens[8:], 4))
    assert list(block_hashes(root_hash(), [], 4)) == []


class AllocatorMachine(RuleBasedStateMachine):
    """Random use, against a model that knows only holders and names."""

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks: int) -> None:
        self.allocator = BlockAllocator(num_blocks, 4)
        self.everything = set(range(1, num_blocks))
        self.holders: list[list[int]] = []
        self.names: dict[bytes, int] = {}
        self.serial = 0

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        held = {block for blocks in self.holders for block in blocks}
        unheld = self.everything - held
        if count > len(unheld):
            with pytest.raises(OutOfBlocksError):
                self.allocator.allocate(count)
            return
        unnamed = unheld - set(self.names.values())
        blocks = self.allocator.allocate(count)
        assert len(set(blocks)) == count
        assert set(blocks) <= unheld
        evicted = set(blocks) & set(self.names.values())
        assert not evicted or unnamed <= set(blocks), "free blocks go first"
        self.names = {key: block for key, block in self.names.items() if block not in evicted}
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.allocator.release(self.holders.pop(index))

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.names)), unique=True))
        blocks = self.allocator.match_prefix(chosen)
        assert blocks == [self.names[key] for key in chosen]
        self.allocator.take(blocks)
        self.holders.append(blocks)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        held = sorted({block for blocks in self.holders for block in blocks})
        block = data.draw(st.sampled_from(held))
        if block not in self.names.values():
            self.serial += 1
            self.names[b"%d" % self.serial] = block
            self.allocator.publish(block, b"%d" % self.serial)

    @rule()
    def reset(self) -> None:
        self.allocator.reset_prefix_cache()
        self.names.clear()

    @rule()
    def release_all(self) -> None:
        self.allocator.release_all()
        self.holders.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "allocator"):
            return
        held = {block for blocks in self.holders for block in blocks}
        assert self.allocator.num_free_blocks == len(self.everything) - len(held)
        for key, block in self.names.items():
            assert self.allocator.match_prefix([key]) == [block]

    def teardown(self) -> None:
        """Every reference can be dropped once, and the last one frees the block."""
        while getattr(self, "holders", None):
            self.allocator.release(self.holders.pop())
            self.agrees()


TestAllocatorMachine = pytest.mark.slow(AllocatorMachine.TestCase)
TestAllocatorMachine.settings = settings(max_examples=150, stateful_step_count=40)
