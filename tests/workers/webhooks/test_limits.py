from __future__ import annotations

from workers.webhooks.limits import NEW, QUICK, SLOW, Limits, Visit


async def test_strangers_who_hang_leave_places_for_receivers_who_have_answered() -> None:
    limits = Limits()
    visit = limits.visit("good")
    assert visit is not None
    visit.leave(True)
    hanging: list[Visit] = []
    for number in range(20 * SLOW):
        one = limits.visit(f"stranger {number % (2 * SLOW)}")
        if one is not None:
            hanging.append(one)
            if limits.in_use["slow"] < SLOW:
                one._takes_long()
    assert limits.in_use == {"slow": SLOW, "new": NEW, "quick": 0}
    assert limits.visit("stranger 0") is None
    assert 1.0 <= limits.put_off_s("stranger 0") <= 3.0
    good = [limits.visit("good") for _ in range(5)]
    assert None not in good
    assert limits.free == QUICK - NEW - 5
    for one in (*hanging, *good):
        assert one is not None
        one.leave(None)
    assert limits.in_use == {"slow": 0, "new": 0, "quick": 0}


async def test_a_window_follows_answers_and_rows_beyond_it_queue_up() -> None:
    limits = Limits()
    for _ in range(100):
        visit = limits.visit("one")
        assert visit is not None
        visit.leave(True)
    visits = [limits.visit("one") for _ in range(65)]
    assert [visit is None for visit in visits] == [False] * 64 + [True]
    for visit in visits[:10]:
        assert visit is not None
        visit.leave(False)
    assert limits.visit("one") is None
    for visit in visits[10:64]:
        assert visit is not None
        visit.leave(None)
    assert limits.visit("one") is not None
    assert limits.visit("one") is None
    waits = [limits.put_off_s("two") for _ in range(2000)]
    assert waits[0] < 0.1 < waits[20] < waits[1500] <= 36.0
