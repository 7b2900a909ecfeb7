"""Virtual time: nothing waits, everything happens in one order, and a standstill is an error."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from weft.clock import Clock, SystemClock, VirtualClock


def test_sleeping_a_year_takes_no_time_but_moves_the_clock() -> None:
    clock = VirtualClock()

    async def main() -> float:
        await asyncio.sleep(365 * 86_400)
        return clock.now()

    assert clock.run(main()) == 365 * 86_400
    assert clock.wall() == VirtualClock.EPOCH + 365 * 86_400


def test_the_loop_and_the_clock_tell_the_same_time() -> None:
    clock = VirtualClock()

    async def main() -> None:
        for delay_s in (0.0, 0.1, 7.0, 1e-6):
            await asyncio.sleep(delay_s)
            assert asyncio.get_running_loop().time() == clock.now()

    clock.run(main())


def test_a_timeout_fires_at_its_deadline() -> None:
    clock = VirtualClock()

    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.sleep(100)
        return clock.now()

    assert clock.run(main()) == 2.5


def test_work_that_ends_before_its_deadline_is_not_cancelled() -> None:
    clock = VirtualClock()

    async def main() -> str:
        async with asyncio.timeout(2.5):
            return await asyncio.sleep(2.4, "done")

    assert clock.run(main()) == "done"


def test_tasks_wait_side_by_side() -> None:
    clock = VirtualClock()

    async def main() -> list[int]:
        return await asyncio.gather(*(asyncio.sleep(10 - n, n) for n in range(10)))

    assert clock.run(main()) == list(range(10))
    assert clock.now() == 10


def traced(clock: VirtualClock) -> list[tuple[float, int]]:
    """Run 20 tasks that wake at crossing and at equal times; return who woke when."""
    trace: list[tuple[float, int]] = []

    async def worker(number: int) -> None:
        for step in range(5):
            await asyncio.sleep(((number * 7 + step * 3) % 5) * 0.5)
            trace.append((clock.now(), number))

    async def main() -> None:
        await asyncio.gather(*(worker(number) for number in range(20)))

    clock.run(main())
    return trace


def test_equal_programs_run_in_equal_order() -> None:
    first, second = traced(VirtualClock()), traced(VirtualClock())
    assert first == second
    assert [at for at, _ in first] == sorted(at for at, _ in first)
    assert len(first) == 100


def test_a_standstill_is_an_error_and_not_a_hang() -> None:
    async def waits_for_nobody() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing can happen any more"):
        VirtualClock().run(waits_for_nobody())


def test_two_tasks_that_wait_for_each_other_are_a_standstill() -> None:
    async def main() -> None:
        a, b = asyncio.Event(), asyncio.Event()

        async def one() -> None:
            await a.wait()
            b.set()

        async def other() -> None:
            await b.wait()
            a.set()

        await asyncio.gather(one(), other())

    with pytest.raises(RuntimeError, match="all tasks wait"):
        VirtualClock().run(main())


def test_real_sockets_still_carry_bytes() -> None:
    clock = VirtualClock()

    async def main() -> bytes:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write((await reader.readexactly(4))[::-1])
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"weft")
            # A timer keeps the loop from calling the wait for the kernel a standstill.
            keep = asyncio.create_task(asyncio.sleep(1e12))
            received = await reader.readexactly(4)
            keep.cancel()
            writer.close()
            await writer.wait_closed()
        return received

    assert clock.run(main()) == b"tfew"


def test_two_clocks_in_two_threads_do_not_meet() -> None:
    seen: dict[str, float] = {}

    def live(name: str, delay_s: float) -> None:
        clock = VirtualClock()
        clock.run(asyncio.sleep(delay_s))
        seen[name] = clock.now()

    threads = [threading.Thread(target=live, args=(name, delay_s)) for name, delay_s in (("short", 1.0), ("long", 9.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == {"short": 1.0, "long": 9.0}


@pytest.mark.parametrize("delay_s", [-1.0, -1e-9, float("nan")])
def test_time_never_goes_back(delay_s: float) -> None:
    clock = VirtualClock()
    with pytest.raises(ValueError, match="forward only"):
        clock.advance(delay_s)
    assert clock.now() == 0.0


def test_a_clock_can_be_advanced_by_hand() -> None:
    clock = VirtualClock()
    clock.advance(1.5)
    clock.advance(0.0)
    assert clock.now() == 1.5


def test_the_result_and_the_exception_of_the_program_come_out() -> None:
    async def fails() -> None:
        await asyncio.sleep(1)
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        VirtualClock().run(fails())


async def test_the_system_clock_is_the_running_loops_clock() -> None:
    before = SystemClock().now()
    during = asyncio.get_running_loop().time()
    after = SystemClock().now()
    assert before <= during <= after


def test_both_clocks_are_clocks() -> None:
    def reads(clock: Clock) -> tuple[float, float]:
        return clock.now(), clock.wall()

    assert reads(VirtualClock()) == (0.0, VirtualClock.EPOCH)
    now, wall = reads(SystemClock())
    assert now > 0
    assert wall > VirtualClock.EPOCH


@pytest.mark.parametrize("start_s", [0.0, 1e6, 1e9])
def test_late_timers_fire_even_where_floats_are_coarse(start_s: float) -> None:
    clock = VirtualClock()
    clock.advance(start_s)
    wait: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0.1)  # noqa: E731

    async def main() -> None:
        for _ in range(50):
            await wait()

    clock.run(main())
    assert clock.now() == pytest.approx(start_s + 5.0)


class Diary:
    """What a process did, and when."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.entries: list[tuple[float, str]] = []

    def note(self, what: str) -> None:
        self.entries.append((self.clock.now(), what))

    async def every_second(self, times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(1.0)
            self.note("tick")


def test_two_who_wait_for_less_than_the_loop_tells_apart_come_to_an_end() -> None:
    """A timer that is due within the loop's resolution runs now. Two that woke each other so stopped the time."""
    clock = VirtualClock()

    async def waits(until: float) -> int:
        num_waits = 0
        while (left_s := until - clock.now()) > 0:
            num_waits += 1
            assert num_waits < 10, "it waits for ever"
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await asyncio.Event().wait()
        return num_waits

    async def play() -> list[int]:
        await asyncio.sleep(1.0 - 4e-7)
        first = asyncio.ensure_future(waits(1.0))
        for _ in range(2):  # one begins where the other's timer runs
            await asyncio.sleep(0)
        return [await waits(1.0), await first]

    assert max(clock.run(play())) <= 3
    assert clock.now() == pytest.approx(1.0, abs=1e-6)


def test_a_frozen_process_does_nothing_and_then_what_it_missed_while_others_go_on() -> None:
    clock = VirtualClock()
    frozen, other = Diary(clock), Diary(clock)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(diary.every_second(4), context=clock.context_of(diary)) for diary in (frozen, other)]
        await asyncio.sleep(1.5)
        clock.freeze(frozen)
        await asyncio.sleep(5.0)
        clock.thaw(frozen)
        await asyncio.gather(*tasks)

    clock.run(main())
    assert other.entries == [(at, "tick") for at in (1.0, 2.0, 3.0, 4.0)]
    assert frozen.entries == [(at, "tick") for at in (1.0, 6.5, 7.5, 8.5)]


def test_who_thaws_takes_up_what_it_was_given_before_timers_that_are_over() -> None:
    """As an event loop does that finds both when it looks again: what came in time is not late."""
    clock = VirtualClock()
    diary = Diary(clock)

    async def wait(mail: asyncio.Queue[str]) -> None:
        try:
            async with asyncio.timeout(3.0):
                diary.note(await mail.get())
        except TimeoutError:
            diary.note("nothing came")

    async def main() -> None:
        mail: asyncio.Queue[str] = asyncio.Queue()
        task = asyncio.get_running_loop().create_task(wait(mail), context=clock.context_of(diary))
        await asyncio.sleep(1.0)
        clock.freeze(diary)
        await asyncio.sleep(1.0)
        mail.put_nowait("a letter")
        await asyncio.sleep(8.0)
        clock.thaw(diary)
        await task

    clock.run(main())
    assert diary.entries == [(10.0, "a letter")]


def test_what_is_cancelled_while_it_is_frozen_does_not_come() -> None:
    clock = VirtualClock()
    diary = Diary(clock)

    async def main() -> None:
        timer = asyncio.get_running_loop().call_later(1.0, diary.note, "too late", context=clock.context_of(diary))
        clock.freeze(diary)
        await asyncio.sleep(2.0)
        timer.cancel()
        clock.thaw(diary)
        await asyncio.sleep(2.0)

    clock.run(main())
    assert diary.entries == []
