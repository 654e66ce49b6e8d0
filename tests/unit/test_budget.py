"""Budget: bounded, in order, and nothing is lost when a waiter is cancelled."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from triptych.shared.budget import Budget


class Holder:
    """A task that holds an amount until told to let go."""

    def __init__(self, budget: Budget[Holder], amount: int) -> None:
        self.amount = amount
        self.holds = asyncio.Event()
        self.let_go = asyncio.Event()
        self.task = asyncio.create_task(self._run(budget, amount))

    async def _run(self, budget: Budget[Holder], amount: int) -> None:
        async with budget.hold(amount, self):
            self.holds.set()
            await self.let_go.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_large_amount_is_not_overtaken() -> None:
    budget: Budget[Holder] = Budget(10)
    first, large, small = Holder(budget, 6), Holder(budget, 8), Holder(budget, 1)
    await settle()
    assert (first.holds.is_set(), large.holds.is_set(), small.holds.is_set()) == (True, False, False)
    first.let_go.set()
    await settle()
    assert (large.holds.is_set(), small.holds.is_set()) == (True, True)
    for holder in (large, small):
        holder.let_go.set()
        await holder.task
    assert budget.num_held == 0


async def test_more_than_all_waits_until_it_is_alone() -> None:
    budget: Budget[Holder] = Budget(10)
    one, huge = Holder(budget, 1), Holder(budget, 1000)
    await settle()
    assert not huge.holds.is_set()
    one.let_go.set()
    await settle()
    assert (huge.holds.is_set(), budget.num_held) == (True, 10)
    huge.let_go.set()
    await huge.task
    assert budget.num_held == 0


@pytest.mark.parametrize("is_given", [False, True])
async def test_a_cancelled_waiter_leaves_nothing_behind(is_given: bool) -> None:
    budget: Budget[Holder] = Budget(10)
    first, second, third = Holder(budget, 10), Holder(budget, 10), Holder(budget, 3)
    await settle()
    if is_given:  # in the same turn of the loop
        first.let_go.set()
        first.task.get_loop().call_soon(second.task.cancel)
    else:
        second.task.cancel()
        first.let_go.set()
    await asyncio.gather(second.task, return_exceptions=True)
    await settle()
    assert third.holds.is_set()
    third.let_go.set()
    await third.task
    assert budget.num_held == 0


async def test_nothing_is_free() -> None:
    budget: Budget[str] = Budget(1)
    async with AsyncExitStack() as stack:
        for name in ("a", "b", "c"):
            await stack.enter_async_context(budget.hold(0, name))
        assert budget.num_held == 0


async def test_who_holds_and_wants_more_goes_before_who_holds_nothing() -> None:
    budget: Budget[Holder] = Budget(10)
    first, second = Holder(budget, 5), Holder(budget, 2)
    await settle()
    more = [asyncio.create_task(budget.add(amount, holder)) for amount, holder in ((2, first), (2, second), (1, first))]
    third = Holder(budget, 1)
    await settle()
    assert [task.done() for task in more] == [True, True, False], "without room one gets more than there is"
    assert (third.holds.is_set(), budget.num_held) == (False, 11)
    second.let_go.set()
    await settle()
    assert more[2].done()
    assert (third.holds.is_set(), budget.num_held) == (True, 9)
    for holder in (second, first, third):
        holder.let_go.set()
        await holder.task
    assert budget.num_held == 0


async def test_only_one_gets_more_than_there_is() -> None:
    budget: Budget[Holder] = Budget(10)
    first, second = Holder(budget, 5), Holder(budget, 5)
    await settle()
    of_first, of_second = (asyncio.create_task(budget.add(3, holder)) for holder in (first, second))
    await settle()
    assert (of_first.done(), of_second.done(), budget.num_held) == (True, False, 13)
    again = asyncio.create_task(budget.add(4, first))
    await settle()
    assert again.done(), "it never waits for those who wait for it"
    first.let_go.set()
    await settle()
    assert (of_second.done(), budget.num_held) == (True, 8)
    second.let_go.set()
    await second.task
    assert budget.num_held == 0


async def test_who_no_longer_wants_more_keeps_nobody_waiting() -> None:
    budget: Budget[Holder] = Budget(10)
    first, second, third = Holder(budget, 5), Holder(budget, 3), Holder(budget, 1)
    await settle()
    await budget.add(3, first)  # 12 of 10
    second.let_go.set()
    await settle()
    more, last = asyncio.create_task(budget.add(3, third)), Holder(budget, 1)
    await settle()
    assert (more.done(), last.holds.is_set()) == (False, False)
    more.cancel()
    await settle()
    assert last.holds.is_set()
    for holder in (first, third, last):
        holder.let_go.set()
        await holder.task
    assert budget.num_held == 0


async def test_whoever_is_first_in_the_order_is_next() -> None:
    budget: Budget[Holder] = Budget(10, lambda waiting: sorted(waiting, key=lambda one: one.amount))
    first, large, small, middle = (Holder(budget, amount) for amount in (10, 8, 2, 5))
    await settle()
    first.let_go.set()
    await settle()
    assert [one.holds.is_set() for one in (small, middle, large)] == [True, True, False]
    for one in (small, middle, large):
        one.let_go.set()
        await one.task
    assert budget.num_held == 0
